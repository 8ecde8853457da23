"""Modules that a run imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.distributed.environment import rank_environment
from tests.support.models import save_tokenizer
from tests.support.ports import free_port
from tests.support.runs import TINY

SCRIPT = """
import sys
from pipeline.cli import main
main({command}, standalone_mode=False)
assert "pipeline.execution.runner" in sys.modules  # it ran here, not in a child
assert not [name for name in sys.modules if name.startswith("pipeline.planning")]
"""


@pytest.mark.full
def test_neither_a_run_nor_its_resumption_imports_planning(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("the lamb was sure to go\n" * 100)
    stages = {
        "model": {"use": "model.hf", "config": TINY, "tokenizer": "./tokenizer"},
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {"use": "data.text", "files": "./text.txt", "sequence_length": 8},
        "optimizer": {"use": "optimizer.adamw"},
        "wrap": {"use": "wrap.fsdp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {"use": "train.causal_lm", "steps": 2, "global_batch_size": 2},
    }
    recipe = {"name": "tiny", "launch": {"procs": 1, "device": "cpu"}, "stages": stages}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    for command in (["run", "recipe.yaml", "--run-dir", "run"], ["resume", "run", "train.steps=3"]):
        code = SCRIPT.format(command=command)
        alone = rank_environment(0, 1)
        alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
            env=os.environ | alone,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 3
    assert not (tmp_path / "run/memory.json").exists()  # CPUs have no trace to take
