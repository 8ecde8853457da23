"""A registry of small stages, and `pipe` with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.chain.registry import BUILT_IN, Entry, Registry
from pipeline.cli import main

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
def pipe(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Return a call of `pipe ARGS` with the fake stages, in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(main, args, obj=registry)
