"""The optimizer and the schedule of a recipe, before any parameter exists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class NamedParameter(NamedTuple):
    """A parameter with its name and its full shape, which a partitioned parameter does not know."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    shard: int = 0
    """Number of the shard that this process holds. Replicas have the same; one shard is 0."""


class StateCodec(ABC):
    """Layout of optimizer state that is not kept as tensors of the parameter's shape.

    A parameter's state in the optimizer is a mapping. Apart from the count of updates, all its
    values come from `start`. For a sharded parameter it covers this process's elements alone.
    """

    @abstractmethod
    def start(self, parameter: Tensor, count: int) -> dict[str, Tensor]:
        """State of a parameter before its first update: `count` elements, with the dtype and on the
        device of `parameter`."""

    @abstractmethod
    def unpack(self, state: Mapping[str, Any], moment: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a moment as a flat tensor: a live view or a copy."""

    @abstractmethod
    def pack(self, state: Mapping[str, Any], moment: str, values: Tensor) -> None:
        """Set all elements of a moment to `values`, which come from `unpack` and were overwritten
        since. Unpacking, packing and unpacking again gives the same bits."""


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """Factories for the optimizer and its schedule."""

    algorithm: str
    """Name of the update rule (`adamw`). A strategy may run its own kernel of the same rule. Where
    the stage has an attribute of this name too, strategies can check it before anything starts."""
    hyperparameters: Mapping[str, Any]
    """Arguments of the rule's torch class: lr, betas, eps, weight_decay."""
    groups: Callable[[Iterable[NamedParameter]], list[dict[str, Any]]]
    """A model's parameters -> torch parameter groups, each with `params` and its overrides."""
    moments: Sequence[str]
    """Names of what the optimizer keeps for each element of a parameter. Without a `packing`, keys
    of its state that are tensors of the parameter's shape, zeros at first."""
    packing: StateCodec | None = None
    counts_updates: bool = True
    """Whether the optimizer's state has a `step`, the number of updates of the parameter."""
    build: Callable[[list[dict[str, Any]]], Optimizer]
    """Parameter groups -> torch optimizer."""
    lr_scale: Callable[[int, int], float]
    """(zero-based step, total steps) -> factor on every group's base learning rate."""
    schedule_warnings: Callable[[int], Iterable[str]] = lambda total: ()
    """Function of the number of steps that yields warnings about a schedule that is probably a
    mistake."""
    max_grad_norm: float | None
