"""A run that does not fit its GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.models import save_tokenizer
from tests.support.pipe import FOR_RANKS, REPOSITORY
from tests.support.runs import TINY
from tests.support.tiny_recipe import training

LARGE = TINY | {
    "vocab_size": 3 << 20, "hidden_size": 1 << 12, "intermediate_size": 3 << 20,
    "num_hidden_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
"""Five weights of 48 GiB: a GPU of 80 GB holds one, and has memory left for the tests beside."""


def recipe(folder: Path, device: str) -> Path:
    save_tokenizer(folder / "tokenizer")
    (folder / "text.txt").write_text("the lamb was sure to go\n" * 100)
    stages = training(checkpoint={"every": 2}, train={"steps": 4})
    stages["model"] |= {"config": LARGE, "tokenizer": "./tokenizer"}
    stages["data"] = {"use": "data.text", "files": "./text.txt", "sequence_length": 8}
    path = folder / "recipe.yaml"
    launch = {"procs": 1, "device": device, "restarts": {"limit": 0}}
    path.write_text(json.dumps({"name": "large", "launch": launch, "stages": stages}))
    return path


def pipe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `pipe` to its end."""
    left_out = {*FOR_RANKS, "LOCAL_WORLD_SIZE"}  # of the group in this process
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PYTHONPATH"] = str(REPOSITORY)
    return subprocess.run(
        [sys.executable, "-m", "pipetrain", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_plan_is_beside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = pipe(tmp_path, "run", str(recipe(tmp_path, "cuda")), "--run-dir", str(run))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr + result.stdout
    first, *rest = result.stderr[result.stderr.index("error: ") :].splitlines()
    assert first.startswith(
        "error: rank 0 failed in slot `wrap`: OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 48.00 GiB"
    )
    snapshot = run / "failures" / "rank-00000.memory.json.gz"
    assert f"  what held the memory: {snapshot}" in rest
    assert snapshot.stat().st_size
    at = rest.index("  the plan:")
    assert rest[at - 1] == f"  continue with: pipe resume {run}"
    verdict, *table = rest[at + 1 :]
    assert re.match(r"  does not fit \(.*a GPU in .*\): [\d.]+ GiB of [\d.]+ a GPU, ", verdict)
    assert any(line.startswith("  memory per GPU, GiB") for line in table)
