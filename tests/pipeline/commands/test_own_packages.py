"""A user's folder may have packages named `pipeline` and `stages`, even on PYTHONPATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.stages.data.fakes import byte_tokenizer
from tests.support.runs import TINY

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with packages of these names, which fail when they are imported."""
    for name in ("pipeline", "stages"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(f"raise SystemExit('the user\\'s {name}')\n")
        (package / "cli.py").touch()
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([".", str(folder), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pipetrain", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_recipe_is_checked_and_trained(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "text.txt").write_text("A folder may have any packages. " * 40)
    config = TINY | {"vocab_size": 260, "eos_token_id": 256}
    stages = {
        "model": {"use": "model.hf", "config": config, "tokenizer": "./tokenizer"},
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {
            "use": "data.text", "files": "./text.txt", "sequence_length": 16, "cache": "./cache"
        },
        "optimizer": {"use": "optimizer.adamw"},
        "wrap": {"use": "wrap.fsdp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {"use": "train.causal_lm", "steps": 2, "global_batch_size": 4},
    }  # fmt: skip
    launch = {"procs": 2, "device": "cpu"}
    recipe = {"name": "mine", "launch": launch, "stages": stages}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    checked = run(folder, "check", "recipe.yaml")
    assert checked.returncode == 0, checked.stderr
    trained = run(folder, "run", "recipe.yaml", "--run-dir", "run")
    assert trained.returncode == 0, trained.stderr
    assert (folder / "run/checkpoints/step-00000002/manifest.json").is_file()
