"""Processes that import everything, and wait to be told to begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.synchronize import Event
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A process that waits to be told to begin."""

    process: SpawnProcess
    go: Event

    def call(self, seconds: float) -> str:
        """Have it begin; returns why it has not ended well in time, or nothing."""
        self.go.set()
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            return "cut short"
        return f"exit code {self.process.exitcode}" if self.process.exitcode else ""


def prepared(context: SpawnContext, target: Callable[..., object], *arguments: Any) -> Prepared:
    """Start a process that will call `target`, and dies with this one."""
    go = context.Event()
    process = context.Process(target=_when_told, args=(go, target, *arguments), daemon=True)
    process.start()
    return Prepared(process=process, go=go)


def _when_told(go: Event, target: Callable[..., object], *arguments: Any) -> None:
    go.wait()
    target(*arguments)
