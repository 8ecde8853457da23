"""A registry of small stages, `pipe` with it, and a whole run of a tiny training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.chain.registry import BUILT_IN, Entry, Registry
from pipeline.cli import main
from pipeline.contracts.metrics import records
from pipeline.planning.planner import Planners
from tests.faults.conftest import install_plugin
from tests.support.pipe import Outcome, Pipe
from tests.support.tiny_project import tiny_project

FAKES = {
    "model.fake": "Model",
    "data.text": "TextFiles",
    "optimizer.adam": "Adam",
    "wrap.red": "Red",
    "wrap.blue": "Blue",
    "checkpoint.red": "RedCheckpoint",
    "checkpoint.blue": "BlueCheckpoint",
    "train.lm": "Train",
}


@pytest.fixture
def fake_entry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Entry]:
    """Return an entry for a class in fake_stages.py."""
    monkeypatch.syspath_prepend(Path(__file__).parent)

    def make(name: str, attribute: str, distribution: str = BUILT_IN) -> Entry:
        value = f"fake_stages:{attribute}"
        return Entry(name=name, value=value, distribution=distribution, version="1.0")

    return make


@pytest.fixture
def registry(fake_entry: Callable[..., Entry]) -> Registry:
    entries = [fake_entry(name, attribute) for name, attribute in FAKES.items()]
    entries.append(fake_entry("broken.check", "Faulty", "faulty-plugin"))
    entries.append(fake_entry("broken.missing", "Nothing", "faulty-plugin"))
    return Registry(entries)


@pytest.fixture
def fake_planners(fake_entry: Callable[..., Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    """Register planners of the fake stages, which offer strategies, as all planners."""
    fakes = {
        "wrap.red": "RedPlanner",
        "wrap.blue": "BluePlanner",
        "wrap.navy": "BluePlanner",
        "train.lm": "TrainPlanner",
    }
    own = [fake_entry(name, attribute, "other") for name, attribute in fakes.items()]
    monkeypatch.setattr(Planners, "installed", lambda: Planners(own))


@pytest.fixture
def pipe(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Return a call of `pipe ARGS` with the fake stages, in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(main, args, obj=registry)


@dataclass(frozen=True, kw_only=True)
class TinyRun:
    """A run of two processes through all stages with `--json`, which tests leave as it is."""

    pipe: Pipe
    recipe: Path
    folder: Path
    outcome: Outcome

    @property
    def events(self) -> list[dict[str, Any]]:
        """Text on its standard output."""
        return [json.loads(line) for line in self.outcome.stdout.splitlines()]

    @property
    def records(self) -> list[dict[str, Any]]:
        """Its metrics."""
        return list(records(self.folder / "metrics.jsonl"))


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that any process with it on its path sees as an installed distribution of
    stages that misbehave."""
    return install_plugin(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="session")
def tiny_run(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    pipe = Pipe(plugin, tmp_path_factory.mktemp("project"))
    recipe = tiny_project(pipe.folder, track={"use": "track.sqlite", "file": "./runs.sqlite"})
    outcome = pipe("run", "tiny.yaml", "--run-dir", "runs/tiny", "--json")
    assert outcome.code == 0, outcome.stderr
    return TinyRun(pipe=pipe, recipe=recipe, folder=pipe.folder / "runs/tiny", outcome=outcome)
