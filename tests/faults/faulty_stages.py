"""Stages that misbehave on request; a scratch distribution of the tests registers them."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.contracts.stage import Context, Durable
from pipeline.errors import DataError, ExportError

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
]

SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "term": signal.SIGTERM}


class Declared:
    """An artifact of this process only."""

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
    """What training leaves."""


class Exported(Made):
    """What an export leaves."""


def note(ctx: Context, text: str) -> None:
    """Remember on disk that rank 0 did something."""
    if ctx.dist.is_main:
        with (ctx.run_dir / "calls.txt").open("a") as file:
            file.write(text + "\n")


def make(ctx: Context, kind: type[Made], text: str) -> Any:
    """A durable artifact that holds `text`."""
    file = ctx.run_dir / f"{ctx.slot}.txt"
    with ctx.dist.rank0_first() as main:
        if main:
            file.write_text(text)
    return kind(file=file)


@dataclass(frozen=True, kw_only=True)
class Declare:
    """Give something that no disk holds."""

    text: str = ""
    """Anything."""

    def run(self, ctx: Context) -> Declared:
        note(ctx, ctx.slot)
        return Declared(ctx)


@dataclass(frozen=True, kw_only=True)
class Train:
    """Make a file, or misbehave."""

    fault: Fault = "none"
    """How."""
    rank: int = 0
    """Which rank does."""
    peers: Literal["barrier", "collective"] = "barrier"
    """What the others wait in."""

    def run(self, ctx: Context, declared: Declared) -> Trained:
        note(ctx, ctx.slot)
        print(f"raw output of rank {ctx.dist.rank}")
        if self.fault == "main_first":
            with ctx.dist.rank0_first() as main:
                if main:
                    raise ValueError("rank 0 is first")
        if ctx.dist.rank == self.rank:
            misbehave(self.fault, ctx)
        elif self.fault not in ("none", "hang"):
            wait(self.peers, ctx)
        return make(ctx, Trained, "trained")


@dataclass(frozen=True, kw_only=True)
class Export:
    """Copy what was trained."""

    fault: Fault = "none"
    """How it fails unless `run_dir/repaired` is there."""
    suffix: str = ""
    """What to add."""

    def run(self, ctx: Context, trained: Trained) -> Exported:
        note(ctx, ctx.slot)
        if not (ctx.run_dir / "repaired").exists():
            misbehave(self.fault, ctx)
        return make(ctx, Exported, trained.file.read_text() + " exported" + self.suffix)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Read something declared and something made; give nothing."""

    def run(self, ctx: Context, declared: Declared, trained: Trained) -> None:
        note(ctx, ctx.slot)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A place where the environment can have this process killed."""

    def run(self, ctx: Context) -> None:
        if os.environ.get("KILL_AT") == ctx.slot:
            os.kill(os.getpid(), signal.SIGKILL)


def misbehave(fault: Fault, ctx: Context) -> None:
    """Do what is asked for, in this process."""
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
    if fault == "full":
        with (ctx.run_dir / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    if fault == "child":
        start_child(ctx)
        raise ValueError("boom")
    if fault == "hang":
        (ctx.run_dir / "hanging").touch()
        time.sleep(600)


def start_child(ctx: Context) -> None:
    """A process of the rank's own, which knows nothing of the run."""
    import subprocess

    code = "import time; time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code, str(ctx.run_dir)], stdout=subprocess.DEVNULL)


def wait(peers: str, ctx: Context) -> None:
    """Where ranks are when another one dies."""
    if peers == "barrier":
        ctx.dist.barrier()
        return
    import torch

    torch.distributed.all_reduce(torch.zeros(1))


if os.environ.get("FAULTY_IMPORT") == os.environ.get("RANK", "none"):
    raise ImportError("this rank lacks a library")
