"""The optimizer, the schedule and the dtypes of a recipe, before any parameter exists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from pipeline.errors import StageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer


class NamedParameter(NamedTuple):
    """A parameter with its name and its full shape, which a partitioned parameter does not know."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    shard: int = 0
    """Number of the shard that this process holds. Replicas have the same; one shard is 0."""
    kind: type[nn.Module] | None = None
    """Class of the module that holds it, or a subclass that a strategy has made: use issubclass."""


class StateCodec(ABC):
    """Layout of optimizer state that is not kept as tensors of the parameter's shape. A parameter's
    state is a mapping whose values, but the count of updates, come from `start`; of a sharded one
    it covers only this process's elements."""

    @abstractmethod
    def start(self, parameter: Tensor, count: int) -> dict[str, Tensor]:
        """State before the first update: `count` elements of the parameter's dtype and device."""

    @abstractmethod
    def unpack(self, state: Mapping[str, Any], moment: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a moment as a flat tensor: a live view or a copy."""

    @abstractmethod
    def pack(self, state: Mapping[str, Any], moment: str, values: Tensor) -> None:
        """Store `values` as all elements of a moment. They came from `unpack`, and the caller has
        written into them. Unpacking what was packed returns the same bits."""


class WholeMatrices(Protocol):
    """Applies a function to whole matrices, however parameters are divided."""

    def __call__(
        self,
        parameters: Iterable[nn.Parameter],
        part: Callable[[nn.Parameter], Tensor],
        function: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter, in any order, with its part of the results (collective).

        All ranks that hold parts of the same parameters give these in the same order, and take
        every result. `part(parameter)` is this rank's part of a tensor of the parameter's shape,
        such as its momentum after a gradient. `function` is called once for each whole matrix, on
        one of the ranks: the last two dimensions of a tensor, each of the matrices of a tensor of
        three or more, and a vector as it is. It returns a matrix of the same shape. Results are
        sharded and typed as the parts were."""


class UpdateRule(NamedTuple):
    """An update rule, as far as a strategy has to know it."""

    algorithm: str
    """Name of the rule (`adamw`). A strategy may run its own kernel of the same rule."""
    elementwise: bool = True
    """Whether each element is updated by its own gradient and moments, not by whole matrices."""


@dataclass(frozen=True, kw_only=True)
class OptimizerPart:
    """Factories for the optimizer of some of the parameters, and its schedule."""

    name: str = ""
    """Name of the part in metrics and messages; needed where there are several."""
    takes: Callable[[NamedParameter], bool] = lambda parameter: True
    """Whether a trained parameter belongs to this part, unless an earlier part takes it."""
    algorithm: str
    elementwise: bool = True
    """As in `UpdateRule`."""
    hyperparameters: Mapping[str, Any]
    """Arguments of the rule's torch class: `lr` always, betas, eps, weight_decay."""
    groups: Callable[[Iterable[NamedParameter]], list[dict[str, Any]]]
    """Parameters -> torch parameter groups: `params` and what differs from `hyperparameters`."""
    moments: Sequence[str]
    """Names of what the optimizer keeps for each element of a parameter. Without a `packing`, keys
    of its state that are tensors of the parameter's shape, zeros at first."""
    packing: StateCodec | None = None
    counts_updates: bool = True
    """Whether the optimizer's state has a `step`, the number of updates of the parameter."""
    build: Callable[..., Optimizer]
    """Parameter groups -> torch optimizer. Where the rule is not `elementwise`, it is called with
    a `WholeMatrices` too, for the optimizer's `step` to call."""
    lr_scale: Callable[[int, int], float]
    """(zero-based step, total steps) -> factor on every group's base learning rate."""


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """The parts of a recipe's optimizer, and what they share. Raises StageError unless several
    parts have different names, and each has a learning rate."""

    parts: Sequence[OptimizerPart]
    max_grad_norm: float | None
    """Limit of the norm of the whole model's gradient."""
    schedule_warnings: Callable[[int], Iterable[str]] = lambda total: ()
    """Number of steps -> warnings about a schedule that is probably a mistake."""

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if len(names) > 1 and ("" in names or len({*names}) < len(names)):
            raise StageError(f"parts of the optimizer need different names, these are {names}")
        for part in self.parts:
            if "lr" not in part.hyperparameters:
                raise StageError(f"{part.algorithm} has no `lr` among its hyperparameters")

    @property
    def rules(self) -> list[UpdateRule]:
        """The update rule of each part."""
        return [UpdateRule(part.algorithm, part.elementwise) for part in self.parts]

    def divide(self, parameters: Iterable[NamedParameter]) -> list[list[NamedParameter]]:
        """The trained ones among a model's parameters, in order, by part. Raises StageError for one
        that no part takes."""
        own: list[list[NamedParameter]] = [[] for _ in self.parts]
        for one in parameters:
            if one.parameter.requires_grad:
                number = next((n for n, part in enumerate(self.parts) if part.takes(one)), None)
                if number is None:
                    raise StageError(
                        f"no part of the optimizer takes the trained parameter {one.name}",
                        hint="the last part should take every parameter",
                    )
                own[number].append(one)
        return own

    def lr_scales(self, step: int, total: int) -> list[float]:
        """Each part's factor on its learning rates for zero-based `step` of `total`."""
        return [part.lr_scale(step, total) for part in self.parts]

    def rates(self, lr_scales: Sequence[float]) -> dict[str, float]:
        """Learning rates by name of metric, before the ratios of groups: `lr` of the first part,
        `lr/NAME` of others."""
        return {
            f"lr/{part.name}" if number else "lr": part.hyperparameters["lr"] * scale
            for number, (part, scale) in enumerate(zip(self.parts, lr_scales, strict=True))
        }


DtypeName = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes with one meaning under every strategy.

    master: the dtype the optimizer updates. compute: parameters, activations and inputs of forward
    and backward. reduce: gradients while they are reduced over ranks. buffer: floating buffers;
    None keeps what the model declares. The loss and the gradient norm are always fp32."""

    master: DtypeName
    compute: DtypeName
    reduce: DtypeName
    buffer: DtypeName | None
    loss_scaling: LossScaling | None
    """Set exactly when `compute` is fp16."""


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Dynamic loss scaling (Micikevicius et al. 2018, Mixed Precision Training, section 3.2):
    doubled after `growth_interval` steps without overflow, halved (and the step skipped) on one."""

    initial_scale: float = 65536.0
    growth_interval: int = 2000


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a DtypeName."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The DtypeName of a torch dtype; torch's name for a dtype that a recipe cannot ask for."""
    import torch

    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
