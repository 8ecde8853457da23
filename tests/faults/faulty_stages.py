"""Stages that misbehave on request; a scratch distribution of the tests registers them."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.contracts.stage import Context, Durable
from pipeline.errors import DataError, ExportError
from pipeline.execution.journal import Journal
from pipeline.execution.rundir import JOURNAL

Fault = Literal[
    "none",
    "raise",
    "expected",
    "kill",
    "segv",
    "exit",
    "exit0",
    "term",
    "sys_exit",
    "hang",
    "main_first",
    "child",
    "cleanup",
    "full",
    "chatty",
    "leak",
    "vanish",
    "vanish and raise",
    "vanish and write",
]

SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "term": signal.SIGTERM}


class Declared:
    """An artifact that exists in this process only."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def close(self) -> None:
        note(self.ctx, f"closed {self.ctx.slot}")


@dataclass(frozen=True, kw_only=True)
class Made(Durable):
    """A text file."""

    file: Path

    def record(self) -> dict[str, Any]:
        return {"file": str(self.file)}

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> Made:
        file = Path(record["file"])
        if not file.exists():
            raise ExportError(f"{file} is gone")
        return cls(file=file)


class Trained(Made):
    """Result of a training."""


class Exported(Made):
    """Result of an export."""


def note(ctx: Context, text: str) -> None:
    """Leave a mark on disk that rank 0 has done something."""
    if ctx.dist.is_main:
        with (ctx.run_dir / "calls.txt").open("a") as file:
            file.write(text + "\n")


def make(ctx: Context, kind: type[Made], text: str) -> Any:
    """Make a durable artifact with `text`."""
    file = ctx.run_dir / f"{ctx.slot}.txt"
    with ctx.dist.rank0_first() as main:
        if main:
            file.write_text(text)
    return kind(file=file)


@dataclass(frozen=True, kw_only=True)
class Declare:
    """Give an artifact that exists in memory only."""

    text: str = ""
    """Any number."""

    def run(self, ctx: Context) -> Declared:
        note(ctx, ctx.slot)
        return Declared(ctx)


@dataclass(frozen=True, kw_only=True)
class Train:
    """Make a file, or misbehave."""

    fault: Fault = "none"
    """Kind of misbehaviour."""
    rank: int = 0
    """Rank that misbehaves."""
    peers: Literal["barrier", "collective"] = "barrier"
    """Call in which the other ranks wait."""

    def run(self, ctx: Context, declared: Declared) -> Trained:
        note(ctx, ctx.slot)
        print(f"raw output of rank {ctx.dist.rank}")
        if self.fault == "main_first":
            with ctx.dist.rank0_first() as main:
                if main:
                    raise ValueError("rank 0 is first")
        if ctx.dist.rank == self.rank:
            wait_for_journal(ctx)
            misbehave(self.fault, ctx)
        elif self.fault not in ("none", "hang"):
            wait(self.peers, ctx)
        return make(ctx, Trained, "trained")


@dataclass(frozen=True, kw_only=True)
class Export:
    """Copy the trained file."""

    fault: Fault = "none"
    """Kind of failure unless `run_dir/repaired` exists."""
    suffix: str = ""
    """Text to add."""

    def run(self, ctx: Context, trained: Trained) -> Exported:
        note(ctx, ctx.slot)
        if not (ctx.run_dir / "repaired").exists():
            misbehave(self.fault, ctx)
        return make(ctx, Exported, trained.file.read_text() + " exported" + self.suffix)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Read a declared and a made artifact; give nothing."""

    def run(self, ctx: Context, declared: Declared, trained: Trained) -> None:
        note(ctx, ctx.slot)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Point at which the environment can have this process killed."""

    def run(self, ctx: Context) -> None:
        if os.environ.get("KILL_AT") == ctx.slot:
            os.kill(os.getpid(), signal.SIGKILL)


def wait_for_journal(ctx: Context) -> None:
    """Wait until rank 0 has noted that this slot runs: from that the launcher learns where a rank
    has died."""
    while Journal(ctx.run_dir / JOURNAL).state().slot != ctx.slot:
        time.sleep(0.01)


def misbehave(fault: Fault, ctx: Context) -> None:  # noqa: C901
    """Misbehave in this process as requested."""
    if fault == "raise":
        raise ValueError("boom")
    if fault == "expected":
        raise DataError("no text", file="corpus.jsonl", row=7, hint="give it some")
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])
    if fault in ("exit", "exit0"):
        os._exit(3 if fault == "exit" else 0)
    if fault == "sys_exit":
        sys.exit(0)
    if fault == "cleanup":
        ctx.on_exit(functools.partial(misbehave, "raise", ctx))
    if fault == "leak":
        leak(ctx)
    if fault == "full":
        fill(ctx)
    if fault == "chatty":
        chat(ctx)
    if fault == "child":
        start_child(ctx)
        raise ValueError("boom")
    if fault.startswith("vanish"):
        vanish(fault, ctx)
    if fault == "hang":
        (ctx.run_dir / "hanging").touch()
        time.sleep(600)


def fill(ctx: Context) -> None:
    """Write until the disk is full."""
    with (ctx.run_dir / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def vanish(fault: Fault, ctx: Context) -> None:
    """Delete the run's folder, and fail."""
    shutil.rmtree(ctx.run_dir)
    if fault.endswith("write"):
        ctx.metrics.write({"step": 1})
    misbehave("raise" if fault.endswith("raise") else "kill", ctx)


def leak(ctx: Context) -> None:
    """Say the environment's secrets wherever a careless stage could."""
    import warnings

    secrets = [os.environ[name] for name in os.environ["LEAK"].split()]
    for secret in secrets:
        ctx.log.info("with %s", secret)
        ctx.log.debug("with %s", secret)
        print(f"printed {secret}")
        print(f"printed {secret}", file=sys.stderr)
        warnings.warn(f"warned of {secret}", stacklevel=1)
    raise ValueError(" and ".join(secrets))


def chat(ctx: Context) -> None:
    """Log to a full disk; then there is room again, unless the environment says otherwise."""
    with contextlib.suppress(OSError):
        fill(ctx)
    ctx.dist.barrier()
    for number in range(300):
        ctx.log.info("line %d of many words that are not kept", number)
    ctx.dist.barrier()
    if os.environ.get("STAYS_FULL") != "1":
        (ctx.run_dir / "fill").unlink(missing_ok=True)
    ctx.dist.barrier()


def start_child(ctx: Context) -> None:
    """Start a process of the rank that knows nothing of the run."""
    import subprocess

    code = "import time; time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code, str(ctx.run_dir)], stdout=subprocess.DEVNULL)


def wait(peers: str, ctx: Context) -> None:
    """Wait in the call in which ranks are when another one dies."""
    if peers == "barrier":
        ctx.dist.barrier()
        return
    import torch

    torch.distributed.all_reduce(torch.zeros(1))


if os.environ.get("FAULTY_IMPORT") == os.environ.get("RANK", "none"):
    raise ImportError("this rank lacks a library")
