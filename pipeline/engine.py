"""The narrow port between a training loop and a parallelisation strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class DataShard:
    """This process's coordinates on the data-parallel axis (not its global rank)."""

    index: int
    count: int


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step did.

    `grad_norm` is the L2 norm of the whole model's gradient before clipping, over all ranks.
    `applied` is False when the step was skipped (fp16 overflow). `loss_scale` is 1.0 without
    scaling.
    """

    grad_norm: float
    applied: bool
    loss_scale: float = 1.0


class Engine(ABC):
    """A model with its optimizer, living on this process's device under one strategy.

    Rules that every engine keeps:

    - `backward(loss)` takes the local sum over target tokens, times `shard.count`, over the number
      of target tokens in the whole optimizer step on all ranks. The strategy averages over ranks,
      so the gradient is that of the mean over all target tokens, however they are split.
    - Every micro-batch runs forward and backward inside `microbatch(last=...)`; `last` is True for
      the final micro-batch of an optimizer step, and the same on all ranks.
    - `step(lr_scale=...)` sets every group's learning rate to its base rate times `lr_scale`,
      clips by the global norm, steps, and clears gradients. The schedule is thus a pure function
      of the step and no part of the engine's state.
    """

    model: nn.Module
    """Call it for the forward pass."""
    device: torch.device
    shard: DataShard

    @abstractmethod
    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Surround one forward and backward; decides whether gradients are synchronised."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of `loss`, a scalar normalised as the class says."""

    @abstractmethod
    def step(self, *, lr_scale: float) -> StepReport:
        """Clip, apply the optimizer, clear gradients."""

    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """What is really running, read off the live objects: classes, dtypes, mesh, sharding.

        Values are JSON; written to the run folder and shown on screen.
        """

    def close(self) -> None:
        """Release what outlives the object itself (helper threads, process groups)."""
