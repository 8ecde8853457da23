"""The narrow port between a training loop and a parallelisation strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, SupportsFloat

import pydantic.dataclasses

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from pipeline.contracts.data import MicroBatch
    from pipeline.contracts.objective import LossParts, Measure, Objective, Unit


@dataclass(frozen=True, kw_only=True)
class DataAxis:
    """This process's place on the data-parallel axis: which share of the samples is its own. Not
    the global rank: ranks that run one model together have one place."""

    index: int
    count: int


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Outcome of one optimizer step."""

    grad_norm: SupportsFloat
    """L2 norm of the whole model's gradient before clipping, over all ranks: a float, or what the
    device still computes, for which `float(grad_norm)` waits (`pipeline.utils.HostCopy`)."""
    applied: bool
    """False when the update was left out: after an overflow, or because the step guard refused.
    True also where only the device knew, and left it out (fused kernels)."""
    loss_scale: float = 1.0
    """1.0 without scaling."""


WEIGHT = "weight"
"""Kind of state that every parameter and stored buffer has; the others are optimizer moments, named
as in torch's optimizer state (`exp_avg`)."""


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """This rank's part of one parameter or stored buffer, with its optimizer moments: a range of
    the row-major flattened full tensor, or `count` runs of equal length that begin `stride`
    elements apart (columns of rows of `stride` elements). Valid until the next is taken."""

    name: str
    """Name in the source model; of tied names, the first."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    start: int
    state: Mapping[str, Tensor]
    """Kind -> a live one-dimensional view of these elements in order, all of one length. The weight
    is the master weight where there is one."""
    stride: int = 0
    """0 for a range; the length of a row for columns, also of a single row."""
    count: int = 1

    @property
    def stop(self) -> int:
        """End of the range, or of the first run, in the flattened tensor."""
        return self.start + self.state[WEIGHT].numel() // self.count


_MANIFEST = pydantic.ConfigDict(extra="forbid", ser_json_inf_nan="constants")
"""Configuration of the dataclasses that are also JSON, in a checkpoint's manifest."""


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_MANIFEST)
class ParameterGroup:
    """Hyperparameters of one optimizer group (base learning rate, not the scheduled one), the
    names of its parameters, and the kinds of optimizer state that each of these has."""

    settings: Mapping[str, Any]
    parameters: Sequence[str]
    moments: Sequence[str] = ()


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_MANIFEST)
class LossScale:
    """Dynamic loss scaling: the scale, and the steps applied since it last changed."""

    scale: float
    good_steps: int


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_MANIFEST)
class EngineState:
    """Training state that is not a tensor; the same on every rank, under every strategy.

    A checkpoint's manifest holds it as JSON, without `shapes`: these are in its list of tensors."""

    shapes: Annotated[Mapping[str, tuple[int, ...]], pydantic.Field(exclude=True)] = field(
        default_factory=dict
    )
    """Full shape of every parameter and stored buffer, tied ones once; empty in a state that is
    read from a file, which has a list of tensors."""
    aliases: Mapping[str, str]
    """Tied name -> the name that holds the tensor."""
    frozen: Sequence[str]
    """Parameters that are not trained."""
    groups: Sequence[ParameterGroup]
    updates: Mapping[str, int]
    """Trained parameter -> optimizer steps applied to it."""
    loss_scale: LossScale | None
    averages: Sequence[str] = field(default_factory=list)
    """Kinds of state that are averages of every trained parameter over the training."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_earlier_manifests(cls, given: Any) -> Any:
        """See `_as_earlier_manifests`."""
        match given:
            case {"moments": moments, "groups": [*groups], **rest} if all(
                isinstance(group, dict) for group in groups
            ):
                return rest | {"groups": [{**group, "moments": moments} for group in groups]}
        return given

    @pydantic.model_serializer(mode="wrap")
    def _as_earlier_manifests(self, handler: Any) -> dict[str, Any]:
        """The first releases know one list of `moments`, which every group has. It is written
        where that is true, so that they read all that they can express."""
        found: dict[str, Any] = handler(self)
        kinds = {tuple(group.moments) for group in self.groups}
        if len(kinds) > 1:
            return found
        groups = [{k: v for k, v in one.items() if k != "moments"} for one in found["groups"]]
        first = {key: found.pop(key) for key in ("aliases", "frozen", "groups", "updates")}
        moments = [kind for each in kinds for kind in each]
        return {**first, "groups": groups, "moments": moments, **found}

    def moments(self) -> dict[str, tuple[str, ...]]:
        """Kinds of optimizer state of each trained parameter."""
        return {name: tuple(one.moments) for one in self.groups for name in one.parameters}

    def kinds(self) -> list[str]:
        """Kinds of optimizer state that any parameter has, sorted."""
        return sorted({kind for group in self.groups for kind in group.moments})


StepGuard = Callable[[float], bool]
"""Function of the whole model's gradient norm, before clipping, that says whether to apply the
update. The answer must be the same on all ranks."""


class Engine(ABC):
    """A model with its optimizer, on this process's device under one strategy.

    `state` and `fragments` are the whole training state, whatever the strategy: a checkpoint holds
    exactly that, and `restore` puts it back. A strategy knows nothing of files, and the schedule is
    a pure function of the step and no part of the state."""

    parts: Sequence[nn.Module]
    """The parts of the model that this rank runs, with names as in the source: all of it, or
    several stages of a pipeline."""
    device: torch.device
    data_axis: DataAxis
    random_stream: int
    """Number of this rank's stream of random numbers; the same for ranks that compute copies."""
    random_streams: int
    """Number of all streams."""

    @abstractmethod
    def accumulate(
        self, batches: Iterable[MicroBatch], objective: Objective, *, counts: Mapping[Unit, float]
    ) -> LossParts:
        """Run forward and backward of all micro-batches of a step (collective), so that gradients
        are of the loss over the batches of all ranks, however they are split. Every rank passes as
        many micro-batches; one without rows (`MicroBatch.filler`) adds nothing. `counts` are the
        step's numbers of the objective's units, over all ranks. Returns this rank's part of each
        sum, on the device: 0 where it computes none, or a copy of another's. `total` adds them."""

    @abstractmethod
    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        """Measure each micro-batch (collective), without dropout and without gradients, on the
        weights to be evaluated: the trained ones, unless an engine keeps others for that. Yields
        what the measure returns, shape (rows, width), on one of the ranks that share the
        micro-batch, and None on the others."""

    def total(self, values: Tensor) -> Tensor:
        """Sum of every rank's tensor (collective), in the memory of `values`."""
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(values)
        return values

    @abstractmethod
    def step(
        self, *, lr_scales: Sequence[float], should_step: StepGuard | None = None
    ) -> StepReport:
        """Set every group's learning rate to its base rate times the factor of its part of the plan
        (`OptimizerPlan.lr_scales`), clip by the global norm, apply the optimizer, clear gradients.

        `should_step` is asked before anything is updated. If it answers False, gradients are
        dropped, and weights, optimizer state and counts of updates stay unchanged. A strategy may
        leave out a non-finite gradient without asking."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Facts read off the live objects, as JSON: classes, dtypes, mesh, sharding."""

    @abstractmethod
    def state(self) -> EngineState:
        """Training state other than tensors. Raises StageError for an optimizer whose state cannot
        be assigned to parameters."""

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """This rank's part of every tensor of the training state, for reading; always in the same
        order with the same spans."""

    _waiting: Callable[[], None] | None = None
    """To be called before the training state changes."""

    @property
    def lasting_fragments(self) -> bool:
        """Whether fragments of parameters are the state itself, and in memory."""
        return False

    def before_change(self, call: Callable[[], None]) -> bool:
        """Call a function once, before `step` or `restore` changes the training state next. Until
        then all fragments of parameters that are taken from here on stay valid, together, and keep
        their values. False where an engine does not promise that; the function is not called."""
        if self.lasting_fragments:
            self._waiting = call
        return self.lasting_fragments

    def announce_change(self) -> None:
        """Called by engines with `lasting_fragments` before the training state changes."""
        call, self._waiting = self._waiting, None
        if call is not None:
            call()

    @abstractmethod
    def restore(self, state: EngineState) -> Iterator[Fragment]:
        """Yield the same fragments to be overwritten, each before the next is taken. When every
        rank has taken all of its fragments and called `sync_compute_weights`, the engine is in
        `state`; until then a restore may start again. `groups` is not applied: hyperparameters are
        the recipe's. Raises CheckpointError where `state` cannot be expressed."""

    @abstractmethod
    def sync_compute_weights(self) -> None:
        """Bring what is computed from the masters in line with them (collective)."""

    def close(self) -> None:
        """Release what outlives the object itself (helper threads, process groups)."""
