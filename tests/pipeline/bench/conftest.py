"""A recipe of real stages, and `pipe bench` with invented runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from pipeline.bench import session as measuring
from pipeline.execution.journal import Journal
from pipeline.utils import foreign
from tests.support.tiny_project import CHAIN, tiny_project

RECIPE = """\
name: small
launch: {procs: 2, device: cpu}
stages:
  model: {use: model.fake}
  data: {use: data.text, files: [./a.txt]}
  optimizer: {use: optimizer.adam, lr: 1e-4}
  wrap: {use: wrap.red, stage: 3}
  train: {use: train.lm, steps: 4000}
"""


@pytest.fixture(autouse=True)
def planners(request: pytest.FixtureRequest) -> None:
    """Have fake planners, except for the recipe of real stages."""
    if "real" not in request.fixturenames:
        request.getfixturevalue("fake_planners")


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a recipe of real stages, whose model has no weights anywhere, and its content."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_project(tmp_path)
    stages = {
        **CHAIN,
        "wrap": {"use": "wrap.zero", "stage": 3},
        "checkpoint": {"use": "checkpoint.full", "every": 5},
        "train": {
            "use": "train.causal_lm", "epochs": 2.0, "global_batch_size": 8,
            "micro_batch_size": 2, "accumulation": 2, "eval_every": 5,
        },
    }  # fmt: skip
    content = {"name": "r", "launch": {"procs": 2, "device": "cpu"}, "stages": stages}
    Path("r.yaml").write_text(json.dumps(content))
    return content


@pytest.fixture
def bench(pipe: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a call of the command on the fake recipe. Runs are invented: red ones fail, and one on
    two processes is 1.5 times as fast."""

    def call(arguments: list[str], output: int, seconds: float) -> int:
        content = yaml.safe_load(Path(arguments[1]).read_text())
        run_dir = Path(arguments[3])
        run_dir.mkdir()
        if content["stages"]["wrap"]["use"] == "wrap.red":
            problem = "rank 0 failed in slot `train`: out of memory\n  at somewhere"
            Journal(run_dir / "journal.jsonl").write("run failed", problem=problem)
            for name in ("checkpoints", "logs", "profile"):
                (run_dir / name).mkdir()
            return 1
        seconds = 2.0 if content["launch"]["procs"] == 1 else 4 / 3
        for number in range(content["stages"]["train"]["steps"]):
            record = {
                "step": number + 1, "loss": 1.0, "time": 2e9, "step_seconds": seconds,
                "tokens_per_second": 64 / seconds, "samples_per_second": 8 / seconds,
                "data_wait_share": 0.0,
            }  # fmt: skip
            foreign.append_line(run_dir / "metrics.jsonl", record)
        return 0

    Path("a.txt").touch()
    Path("r.yaml").write_text(RECIPE)
    monkeypatch.setattr(measuring, "_call", call)
    return lambda *arguments: pipe("bench", "r.yaml", *arguments)
