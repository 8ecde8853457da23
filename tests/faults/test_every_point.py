"""A run that dies, or is refused an operation, at any point goes on to the same end."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pipe import REPOSITORY, Outcome, Pipe
from tests.support.points import READ, SITECUSTOMIZE, STARTS, VARIABLE, Plan, Point
from tests.support.tier import FULL, times
from tests.support.tiny_recipe import EXPORT, outcome, training

STEPS, RANKS = 4, 2
STRATEGIES = {
    "ddp": {"use": "wrap.ddp"},
    "fsdp": {"use": "wrap.fsdp"},
    "tensor": {"use": "wrap.fsdp", "tensor_parallel": {"size": 2}},
    "zero1": {"use": "wrap.zero", "stage": 1},
    "zero3": {"use": "wrap.zero", "stage": 3},
}
EACH = times(quick=1, full=30)
"""Points of each strategy and kind of fault."""
MAY_MISS = EACH // 10
"""A run may read a file less often than the one that the points are of. The few points of the quick
tier are in the middle of their kinds, so that none is missed."""
REFUSALS = ("ENOSPC", "EIO", "EROFS")


class Instrumented:
    """A tiny run of a strategy in a folder of its own, with one fault."""

    def __init__(self, plugin: Path, folder: Path, strategy: str) -> None:
        self.pipe = Pipe(plugin, folder, starts=True)
        stages = training(checkpoint={"every": 2}, train={"steps": STEPS}) | EXPORT
        stages["wrap"] = STRATEGIES[strategy]
        restarts = {"limit": 2, "backoff": 0}
        launch = {"procs": RANKS, "device": "cpu", "restarts": restarts}
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(json.dumps({"name": "tiny", "launch": launch, "stages": stages}))
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITECUSTOMIZE)
        path = f"{site}:{plugin}:{REPOSITORY}"
        self.pipe.environment |= {"PYTHONPATH": path}

    def start(self, **plan: object) -> Outcome:
        """Run `pipe run`, instrumented if there is a plan."""
        fields = {"root": str(self.pipe.run_dir), "fired": str(self.pipe.folder / "fired"), **plan}
        given = {VARIABLE: json.dumps(dataclasses.asdict(Plan(**fields)))} if plan else {}  # type: ignore[arg-type]
        arguments = ("run", str(self.recipe), "--run-dir", str(self.pipe.run_dir))
        with tempfile.TemporaryDirectory() as place:
            return self.pipe.fork(Path(place), *arguments, **given).end()

    def outcome(self) -> tuple[bytes, list[float]]:
        """Return weights and losses at the end."""
        return outcome(self.pipe.run_dir, STEPS)

    def fired(self) -> bool:
        """Return whether the fault has happened."""
        return (self.pipe.folder / "fired").exists()


def evenly(points: list[Point]) -> list[Point]:
    """Return EACH of the points, at even distances."""
    return [points[(2 * n + 1) * len(points) // (2 * EACH)] for n in range(EACH)]


Calm = Callable[[str], tuple[list[Point], tuple[bytes, list[float]]]]


@pytest.fixture(scope="session")
def calm(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Return the points of an undisturbed run under a strategy, and its outcome."""
    known: dict[str, tuple[list[Point], tuple[bytes, list[float]]]] = {}

    def find(strategy: str) -> tuple[list[Point], tuple[bytes, list[float]]]:
        if strategy not in known:
            run = Instrumented(plugin, tmp_path_factory.mktemp("calm"), strategy)
            log = run.pipe.folder / "points"
            result = run.start(log=str(log))
            assert result.code == 0, result.stderr
            points = {Point(*json.loads(line)) for line in log.read_text().splitlines()}
            known[strategy] = (sorted(points, key=dataclasses.astuple), run.outcome())
        return known[strategy]

    return find


@pytest.mark.parametrize("strategy", STRATEGIES if FULL else ["ddp"])
def test_a_process_that_is_killed_anywhere(
    plugin: Path, tmp_path_factory: pytest.TempPathFactory, calm: Calm, strategy: str
) -> None:
    points, expected = calm(strategy)
    assert {point.role for point in points} == {"launcher", "rank 0", "rank 1", "writer 0",
                                                "writer 1"}  # fmt: skip
    assert len(points) > 150
    missed: list[Point] = []
    for point in evenly(points):
        run = Instrumented(plugin, tmp_path_factory.mktemp("kill"), strategy)
        result = run.start(**dataclasses.asdict(point))
        if not run.fired():
            missed.append(point)
        elif point.role == "launcher":
            assert result.code == -9, point
            result = run.start()
        assert result.code == 0, (point, result.stderr)
        assert run.outcome() == expected, point
        assert run.pipe.processes() == []
    assert len(missed) <= MAY_MISS, missed


@pytest.mark.parametrize("strategy", STRATEGIES if FULL else ["ddp"])
def test_an_operation_that_is_refused_anywhere(
    plugin: Path, tmp_path_factory: pytest.TempPathFactory, calm: Calm, strategy: str
) -> None:
    points, expected = calm(strategy)
    writing = [point for point in points if point.kind not in STARTS]
    missed: list[Point] = []
    for number, point in enumerate(evenly(writing)):
        run = Instrumented(plugin, tmp_path_factory.mktemp("refusal"), strategy)
        how = "EIO" if point.kind == READ else REFUSALS[number % len(REFUSALS)]
        result = run.start(**dataclasses.asdict(point), how=how)
        if not run.fired():
            missed.append(point)
        assert result.code in (0, 1, 2), (point, how, result.stderr)
        assert "Traceback" not in result.stderr + result.stdout, (point, how, result.stderr)
        assert "a bug in pipe" not in result.stderr, (point, how, result.stderr)
        if result.code:
            assert run.start().code == 0, (point, how)
        assert run.outcome() == expected, (point, how)
        assert run.pipe.processes() == []
    assert len(missed) <= MAY_MISS, missed
