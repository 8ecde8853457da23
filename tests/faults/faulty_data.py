"""Toy samples for a real training that the environment can have killed in the middle."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import numpy as np

from pipeline.artifacts import Data, Sample, Samples
from pipeline.stage import Context


class Toy(Samples):
    """Sixteen samples of eight tokens."""

    def __init__(self) -> None:
        self._reads = 0
        self._tokens = np.random.default_rng(3).integers(0, 101, (16, 9))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Sample:
        self._reads += 1
        if os.environ.get("KILL_AT") == f"read {self._reads}":
            os.kill(os.getpid(), signal.SIGKILL)
        tokens = self._tokens[index]
        return Sample(input_ids=tokens[:-1], labels=tokens[1:])

    def targets(self, index: int) -> int:
        return 8


@dataclass(frozen=True, kw_only=True)
class ToyData:
    """Give toy samples."""

    def run(self, ctx: Context) -> Data:
        return Data(train=Toy(), heldout=None, pad_id=0, identity={"toy": 1})
