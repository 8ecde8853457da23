"""Stochastic rounding to bf16 (Zamirai et al. 2020, Revisiting BFloat16 Training)."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

MASK = -(1 << 16)
"""The bits of an fp32 number that bf16 has."""


def round_at_random(values: Tensor, noise: Tensor) -> Tensor:
    """fp32 values as bf16: each becomes one of its two neighbours, with a probability that makes
    the mean the value itself. `noise` is int32, uniform in [0, 65536), of the same shape."""
    # The bits that bf16 lacks are the fraction of the way to the neighbour away from zero.
    rounded = ((values.view(torch.int32) + noise) & MASK).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


class Noise:
    """Random bits that are a function of seed, shard, parameter and update alone: replicas round
    alike, and nothing has to be saved for a run to go on with the same bits."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: dict[Tensor, int] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    def number(self, parameter: Tensor) -> int:
        """Parameters are told apart by the order in which they are first seen."""
        return self._numbers.setdefault(parameter, len(self._numbers))

    def bits(self, parameter: Tensor, like: Tensor, shard: int, step: int) -> Tensor:
        """int32, uniform in [0, 65536), of the shape and on the device of `like`, for update `step`
        of a parameter."""
        text = f"{self._seed}/{shard}/{self.number(parameter)}/{step}".encode()
        generator = self._generators.get(like.device)
        if generator is None:
            generator = self._generators[like.device] = torch.Generator(like.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)
        return torch.randint(
            1 << 16, like.shape, generator=generator, device=like.device, dtype=torch.int32
        )
