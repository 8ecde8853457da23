"""Dropout on activations that tensor-parallel ranks divide, or that each of them has whole.

Ranks of a group begin a step with equal states of torch's generators, so dropout on complete values
is equal. Inside of a stretch, generators are seeded by a number that all ranks draw alike, with or
without their rank. Nothing is kept from one stretch to the next: states that are saved and restored
between steps, and by activation checkpointing, are all that there is. The number is part of the
seed, so that it is known inside, in a recomputed part too. No device is waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

SEEDS = 1 << 40
STRIDE = 0x9E3779B1  # odd, so that stretches in one block have seeds of their own


def has_dropout(module: nn.Module) -> bool:
    """Whether `module` draws random numbers in training."""
    return any(
        (isinstance(one, nn.Dropout) and one.p > 0) or _probability(one) for one in module.modules()
    )


def _probability(module: nn.Module) -> bool:
    return any(
        "drop" in name and isinstance(value, float) and value > 0
        for name, value in vars(module).items()
    )


class Streams:
    """Streams of random numbers of one of `size` ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Draw other numbers than the other ranks; called where all ranks would draw the same."""
        drawn = int(torch.randint(SEEDS, (), device="cpu"))
        with _restored():
            self._seed(drawn, shared=False)
            yield

    @contextlib.contextmanager
    def shared(self, stretch: int) -> Iterator[None]:
        """Inside of `own`: draw what the other ranks draw, for the time of one stretch."""
        with _restored():
            self.switch(stretch, shared=True)
            yield

    def switch(self, stretch: int, *, shared: bool) -> None:
        """Inside of `own`: go on with a stretch's numbers, up to the end of `own` or `shared`."""
        drawn = torch.initial_seed() // (self._size + 1)
        self._seed((drawn + stretch * STRIDE) % SEEDS, shared=shared)

    def _seed(self, drawn: int, *, shared: bool) -> None:
        torch.manual_seed(drawn * (self._size + 1) + (0 if shared else 1 + self._rank))


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield
