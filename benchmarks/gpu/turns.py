"""Blocks of steps of several loops in turns, inside of our training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pipeline import Progress, StepCallback

WARM = 2
"""Steps before the first block; the first compiles."""


class Enough(Exception):
    """Everything has been measured."""


class Loop(Protocol):
    """A loop that takes turns with ours."""

    def run(self, steps: int) -> float: ...


def wait(device: torch.device) -> None:
    """Wait until the device has done everything that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(kw_only=True)
class Turns(StepCallback):
    """Times blocks of `steps` steps of our training, and between them blocks of others. Raises
    Enough behind the last of `rounds` blocks, unless there is a `behind` to call first."""

    device: torch.device
    steps: int
    rounds: int
    opponents: Callable[[], Mapping[str, Loop]]
    """Makes the other loops, once our own memory is known."""
    behind: Callable[[], StepCallback | None] = lambda: None
    """Makes what follows the last block."""
    began: float = field(default_factory=time.perf_counter)
    result: dict[str, Any] = field(default_factory=dict)
    keep: Callable[[], None] = lambda: None
    """Called behind each block, to keep the result so far."""
    _others: Mapping[str, Loop] = field(default_factory=dict, init=False)
    _next: StepCallback | None = field(default=None, init=False)
    _first: int | None = field(default=None, init=False)

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        if self._next is not None:
            self._next.on_step(step, progress, record)
            return
        if self._first is None:
            self._first = step + WARM
            self.result |= {"first_step_seconds": self._passed(), "ours": [], "losses": []}
        self.result["losses"].append(record["loss"])
        done = step - self._first
        if done < 0 or done % self.steps:
            return
        self._turn(done // self.steps)

    def _turn(self, block: int) -> None:
        """End our block of this number, from 1, have the others take theirs, and begin the next."""
        spent = self._passed()
        if block == 0:
            self._reset_peak()
        else:
            self.result["ours"].append(spent / self.steps)
        if block == 1:
            self._note_peak()
            self._others = self.opponents()
        if block:
            for name, other in self._others.items():
                self.began = time.perf_counter()
                other.run(self.steps)
                self.result.setdefault(name, []).append(self._passed() / self.steps)
        self.keep()
        if block == self.rounds:
            self._next = self.behind()
            if self._next is None:
                raise Enough
        self.began = time.perf_counter()

    def _passed(self) -> float:
        """Seconds since the block began, all work done."""
        wait(self.device)
        return time.perf_counter() - self.began

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _note_peak(self) -> None:
        """Peak bytes of torch's tensors, of its allocator, and of the whole device now."""
        if self.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self.device)
        self.result["peak"] = {
            "allocated": torch.cuda.max_memory_allocated(self.device),
            "reserved": torch.cuda.max_memory_reserved(self.device),
            "device": total - free,
        }
