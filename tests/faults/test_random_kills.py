"""A run killed again and again, in a rank or a writer, ends like an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from tests.support.injection import Fault, infect
from tests.support.ports import free_port
from tests.support.processes import forking
from tests.support.tiny_recipe import EXPORT, outcome, training, write

KILLS, STEPS, RANKS = 20, 64, 2
Start = Callable[..., list[int]]


@dataclass(frozen=True)
class Kill:
    """A rank or its writer, and the moment of its kill: a read of a sample, or a file operation."""

    rank: int
    writer: bool
    at: int
    how: str

    def prepare(self, run: Path) -> None:
        """Prepare the rank's process before it starts."""
        if self.writer:
            infect(str(run.parent), Fault(root=str(run / "checkpoints"), at=self.at, how=self.how))
        else:
            os.environ["KILL_AT"] = f"read {self.at}"


def kills() -> list[Kill]:
    """Return kills late enough that each leaves one more checkpoint, so that the run advances."""
    chance = random.Random(20)
    found = []
    for number in range(KILLS):
        rank, writer = chance.randrange(RANKS), number % 2 == 0
        one_save = 45 if rank == 0 else 25
        at = chance.randrange(one_save, 2 * one_save) if writer else chance.randrange(6, 10)
        found.append(Kill(rank, writer, at, chance.choice(["before", "half", "after"])))
    return found


@pytest.fixture(scope="module")
def start(plugin: Path) -> Start:
    """Run `pipe ARGUMENTS` on ranks that have torch loaded already, killed when one fails, as any
    launcher does; return their exit codes."""
    context = forking()

    def call(run: Path, *arguments: str, kill: Kill | None = None) -> list[int]:
        port = str(free_port())
        processes: list[Any] = [
            context.Process(target=_rank, args=(str(plugin), port, rank, run, arguments, kill))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        waiting = {process.sentinel: process for process in processes}
        while waiting:
            for sentinel in wait(list(waiting), 120):
                process = waiting.pop(sentinel)  # type: ignore[index]
                process.join()
                if process.exitcode:
                    for other in waiting.values():
                        other.kill()
        return [process.exitcode for process in processes]

    return call


def _rank(
    plugin: str, port: str, rank: int, run: Path, arguments: tuple[str, ...], kill: Kill | None
) -> None:
    from pipeline.cli import main

    sys.path.insert(0, plugin)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if kill is not None and kill.rank == rank:
        kill.prepare(run)
    main(arguments)


@pytest.mark.full
def test_kills_change_nothing(tmp_path: Path, start: Start) -> None:
    calm, run = tmp_path / "calm", tmp_path / "run"
    stages = training(checkpoint={"every": 1, "keep": 1}, train={"steps": STEPS})
    recipe = write(tmp_path / "recipe.yaml", stages | EXPORT, procs=RANKS)
    begin = ("run", str(recipe), "--run-dir")
    assert start(calm, *begin, str(calm)) == [0, 0]
    command = (*begin, str(run))
    for kill in kills():
        codes = start(run, *command, kill=kill)
        assert codes[kill.rank] == (1 if kill.writer else -signal.SIGKILL), (kill, codes)
        command = ("resume", str(run))
    assert start(run, *command) == [0, 0]
    assert outcome(run, STEPS) == outcome(calm, STEPS)
    assert len(list((run / "checkpoints").iterdir())) == 1
