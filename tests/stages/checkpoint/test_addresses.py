"""Addresses with an unknown scheme are found before a process starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pipeline.testing import plan_view
from stages.checkpoint.sharded import FullCheckpoint, ShardedCheckpoint

PLAN = plan_view({})


@pytest.fixture(autouse=True)
def no_google(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gcsfs" else find(name)
    )


@pytest.mark.parametrize("key", ["folder", "start_from"])
@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("foo://x/y", "foo:// is not opened"),
        ("gs://bucket/x", "gs:// needs a package"),
        ("memory://x", None),
        (str(Path(__file__).parent), None),
        (None, None),
    ],
)
def test_addresses(key: str, address: str | None, told: str | None) -> None:
    (*found,) = ShardedCheckpoint(**{key: address}).check(PLAN)
    assert [(problem.key, problem.message) for problem in found] == ([(key, told)] if told else [])
    assert all(problem.hint for problem in found)


def test_a_start_that_is_not_there_is_a_warning() -> None:
    """A run that has checkpoints of its own does not need it any more."""
    (problem,) = ShardedCheckpoint(start_from="runs/gone").check(PLAN)
    assert (problem.key, problem.warning) == ("start_from", True)
    assert problem.message == "runs/gone does not exist here, and a new run needs it"


def test_the_full_checkpoint_starts_from_the_same() -> None:
    (problem,) = FullCheckpoint(start_from="foo://x").check(PLAN)
    assert (problem.key, problem.message) == ("start_from", "foo:// is not opened")


@pytest.mark.parametrize("folder", ["s3://bucket/x", "s3:/bucket/x", "foo://x"])
def test_the_full_checkpoint_takes_a_path(folder: str) -> None:
    (problem,) = FullCheckpoint(folder=folder).check(PLAN)
    found = (problem.key, problem.message, problem.hint)
    assert found == ("folder", f"{folder} is an address, not a path", "use checkpoint.sharded")
