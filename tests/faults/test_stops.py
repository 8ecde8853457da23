"""Signals and kills at random moments: nothing is lost, and the same command goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

import psutil
import pytest

from pipeline.contracts.metrics import records
from tests.support.pipe import Forked, Outcome, Pipe
from tests.support.tier import times
from tests.support.tiny_recipe import EXPORT, losses, outcome, training

STEPS, RANKS = times(quick=80, full=1200), 2
STOPS = times(quick=2, full=50)
KILLS = times(quick=1, full=20)
SAVE_EVERY = 10
Command = Callable[..., Forked]


def recipe(folder: Path) -> Path:
    """Write a recipe whose run goes on by itself after kills, and saves now and then."""
    stages = training(
        data={"heldout": True},
        checkpoint={"every": SAVE_EVERY, "keep": 2},
        train={"steps": STEPS, "eval_every": 7, "micro_batch_size": 1, "workers": 1},
    )
    launch = {"procs": RANKS, "device": "cpu", "restarts": {"limit": 5, "backoff": 0}}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"name": "tiny", "launch": launch, "stages": stages | EXPORT}))
    return path


@pytest.fixture
def command(pipe: Pipe, tmp_path: Path) -> Command:
    """Start the same command again and again."""
    path, numbers = recipe(tmp_path), iter(range(1000))

    def start(**environment: str) -> Forked:
        place = tmp_path / f"said-{next(numbers)}"
        place.mkdir()
        arguments = ("run", str(path), "--run-dir", str(pipe.run_dir))
        return pipe.fork(place, *arguments, **environment)

    return start


@pytest.fixture(scope="module")
def calm(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[float]]:
    """Return weights and losses of an undisturbed run."""
    folder = tmp_path_factory.mktemp("calm")
    pipe = Pipe(plugin, folder, starts=True)
    assert pipe.run(recipe(folder)).code == 0
    return outcome(pipe.run_dir, STEPS)


def ranks(run: Path) -> list[int]:
    """Return the processes of a run's ranks: they alone hold its rank logs open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            place = str(link.readlink())
        except OSError:
            continue
        if place.startswith(f"{run}/logs/rank-"):
            found.add(int(link.parts[2]))
    return sorted(found)


def moments(chance: random.Random, run: Path, process: Forked) -> Iterator[None]:
    """Wait for random moments while the process is alive, most of them in the training."""
    while process.alive():
        before = len(losses(run))
        steps = chance.choice([0, 5, 12, 30])
        deadline = time.monotonic() + 10
        while steps and len(losses(run)) < before + steps and time.monotonic() < deadline:
            if not process.alive():
                return
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        if process.alive():
            yield


def evaluations(run: Path) -> list[int]:
    return [r["step"] for r in records(run / "metrics.jsonl") if "eval_loss" in r]


def newest(run: Path) -> int:
    """Return the step of the newest checkpoint; 0 without one."""
    names = sorted(path.name for path in (run / "checkpoints").glob("step-????????"))
    return int(names[-1].removeprefix("step-")) if names else 0


def test_stops_lose_no_step(pipe: Pipe, command: Command, calm: tuple[bytes, list[float]]) -> None:
    chance, codes = random.Random(5), []
    result: Outcome | None = None
    for _ in range(STOPS):
        process = command()
        if next(moments(chance, pipe.run_dir, process), "ended") != "ended":
            target = chance.choice(["launcher", "rank"])
            pids = ranks(pipe.run_dir)
            number = chance.choice([signal.SIGTERM, signal.SIGUSR1])
            if target == "rank" and pids:
                os.kill(chance.choice(pids), number)
            else:
                process.send(number)
        result = process.end()
        codes.append(result.code)
        too_early = result.code < 0 and result.seconds < 2 and not result.stdout
        assert result.code in (0, 75) or too_early, result.stderr
        assert newest(pipe.run_dir) == (losses(pipe.run_dir) or [(0, 0.0)])[-1][0], result.stdout
        if result.code == 0:
            break
    assert 75 in codes
    if result is None or result.code != 0:
        saved = newest(pipe.run_dir)
        result = command().end()
        assert f"\ncontinues at step {saved} (" in result.stdout
    assert result.code == 0, result.stderr
    assert outcome(pipe.run_dir, STEPS) == calm
    assert evaluations(pipe.run_dir) == [*range(7, STEPS, 7), STEPS]


def test_ranks_that_are_killed_are_started_again(
    pipe: Pipe, command: Command, calm: tuple[bytes, list[float]]
) -> None:
    chance, killed, process = random.Random(6), 0, command()
    for _ in moments(chance, pipe.run_dir, process):
        saved = newest(pipe.run_dir)
        pids = ranks(pipe.run_dir)
        if pids and saved:
            os.kill(chance.choice(pids), signal.SIGKILL)
            killed += 1
            # the next save may have been on its way, and be ended by the writers of dead ranks
            later = saved + SAVE_EVERY
            pipe.wait_for(lambda later=later: newest(pipe.run_dir) > later or not process.alive())
        if killed == KILLS:
            break
    result = process.end()
    assert result.code == 0, result.stderr
    assert killed == KILLS
    # a writer that has nothing to write any more is not missed
    assert result.stderr.count("starting again in 0 s (restart 1)") >= killed - 1
    assert outcome(pipe.run_dir, STEPS) == calm


@pytest.mark.full
def test_a_launcher_that_is_killed_goes_on_by_the_same_command(
    pipe: Pipe, command: Command, calm: tuple[bytes, list[float]]
) -> None:
    chance, killed = random.Random(7), 0
    while killed < KILLS:
        process = command()
        if next(moments(chance, pipe.run_dir, process), "ended") == "ended":
            break
        process.send(signal.SIGKILL)
        assert process.end().code == -signal.SIGKILL
        pipe.wait_for(lambda: not ranks(pipe.run_dir), limit=5)
        killed += 1
    assert command().end().code == 0
    assert killed == KILLS or newest(pipe.run_dir) == STEPS
    assert outcome(pipe.run_dir, STEPS) == calm


@pytest.mark.full
def test_an_evaluation_ends_at_once_and_is_made_up_for(
    pipe: Pipe, command: Command, calm: tuple[bytes, list[float]]
) -> None:
    process = command(READ_SECONDS="0.4")  # for each of two micro-batches
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 7)
    began = time.monotonic()
    process.send(signal.SIGTERM)
    assert process.end().code == 75
    assert time.monotonic() - began < 10
    assert newest(pipe.run_dir) == 7
    assert evaluations(pipe.run_dir) == []
    assert command().end().code == 0
    assert evaluations(pipe.run_dir) == [*range(7, STEPS, 7), STEPS]
    assert outcome(pipe.run_dir, STEPS) == calm


@pytest.mark.parametrize("others", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_stop_is_not_forgotten_when_ranks_die(pipe: Pipe, command: Command, others: bool) -> None:
    """One rank, or all, while the run saves."""
    process = command()
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 3)
    pids = {pid: psutil.Process(pid) for pid in ranks(pipe.run_dir)}
    held = [pid for pid, process in pids.items() if process.ppid() not in pids]  # no writers
    assert len(held) == RANKS
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    process.send(signal.SIGTERM)
    time.sleep(0.5)
    for pid in held[:1] if others else held:
        os.kill(pid, signal.SIGKILL)
    for pid in held[1:] if others else []:
        os.kill(pid, signal.SIGCONT)
    result = process.end()
    assert result.code == 1, result
    assert "starting again" not in result.stderr
    assert [event["event"] for event in pipe.events()].count("run started") == 1
    assert pipe.events()[-1]["event"] == "run failed"
    assert ranks(pipe.run_dir) == []


def test_a_second_ctrl_c_ends_everything(pipe: Pipe, command: Command) -> None:
    process = command(READ_SECONDS="0.5")
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 1)
    process.send(signal.SIGINT)
    time.sleep(0.3)
    process.send(signal.SIGINT)
    result = process.end()
    assert result.code == -signal.SIGINT
    assert result.stderr == (
        "SIGINT: saving after this step, then stopping; again: stop now and lose the steps since "
        "the newest checkpoint\n"
        f"stopped by a second SIGINT\n  continue with: pipe resume {quote(str(pipe.run_dir))}\n"
    )
    pipe.wait_for(lambda: not ranks(pipe.run_dir), limit=5)


def test_a_stop_is_answered_at_once(pipe: Pipe, command: Command) -> None:
    process = command()
    pipe.wait_for(lambda: newest(pipe.run_dir) >= SAVE_EVERY)
    process.send(signal.SIGTERM)
    result = process.end()
    assert result.code == 75
    first, last, then = result.stderr.splitlines()
    assert first == "SIGTERM: saving after this step, then stopping"
    assert last == "stopped by SIGTERM"
    assert then == f"  continue with: pipe resume {quote(str(pipe.run_dir))}"
