"""Toy samples for a real training that the environment can have killed midway."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.contracts.data import Data, Sample, Samples
from pipeline.contracts.stage import Context


class Toy(Samples):
    """Samples of eight tokens, sixteen by default, all equal except for the odd ones."""

    def __init__(self, size: int = 16, odd: tuple[int, ...] = (), seed: int = 3) -> None:
        self._reads = 0
        self._tokens = np.random.default_rng(seed).integers(0, 101, (size, 9))
        if odd:
            same = [index for index in range(size) if index not in odd]
            self._tokens[same] = 7

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Sample:
        self._reads += 1
        if os.environ.get("KILL_AT") == f"read {self._reads}":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("OOM_AT") == f"read {self._reads}":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        time.sleep(float(os.environ.get("READ_SECONDS", "0")))
        tokens = self._tokens[index]
        return Sample(input_ids=tokens[:-1], labels=tokens[1:])

    def targets(self, index: int) -> int:
        return 8


@dataclass(frozen=True, kw_only=True)
class ToyData:
    """Give toy samples."""

    size: int = 16
    """Number of samples."""
    odd: tuple[int, ...] = ()
    """Indices of the samples that differ from the others."""
    heldout: bool = False
    """Give other samples to evaluate on."""

    def run(self, ctx: Context) -> Data:
        heldout = Toy(4, seed=4) if self.heldout else None
        train = Toy(self.size, tuple(self.odd))
        return Data(train=train, heldout=heldout, pad_id=0, identity={"toy": self.size})
