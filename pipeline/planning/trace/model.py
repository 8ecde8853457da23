"""The model of a trace: its structure, and an engine without a strategy that runs it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pipeline.contracts.data import MicroBatch
from pipeline.contracts.engine import DataAxis, Engine, StepGuard, StepReport
from pipeline.contracts.model import ModelSource
from pipeline.contracts.objective import LossParts, Objective, Unit
from pipeline.contracts.precision import Precision, torch_dtype
from pipeline.contracts.tensors import TensorReader, TensorSpec
from pipeline.planning.shapes import Weight
from pipeline.planning.topology import Division, Topology
from pipeline.planning.trace.marks import Marks
from pipeline.planning.trace.torch_compat import cast_in, deferred_gradients, local, tensors_in
from pipeline.utils.fake_tensors import with_values


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A model's weights and blocks."""

    names: Sequence[str]
    """Names of the modules that are blocks."""
    root: Sequence[Weight]
    """Weights outside of blocks, tied ones once."""
    blocks: Sequence[Sequence[Weight]]
    towers: Sequence[Sequence[Weight]]
    """Weights of the blocks of other parts than the language model."""
    signatures: Sequence[Any]
    """Everything that distinguishes a block from others but its number, for each block."""
    tied: bool
    """Whether two names of the root share one weight."""
    behind: Sequence[str]
    """Names of the root's weights that come behind the blocks."""
    ends: tuple[tuple[str, ...], tuple[str, ...]]
    """Names of the weights of the embedding and of the head, as `ModelSource.ends` gives them."""

    @property
    def weights(self) -> Sequence[Weight]:
        """All weights."""
        return [*self.root, *itertools.chain(*self.towers, *self.blocks)]


def structure(source: ModelSource) -> Structure:
    """Structure of a source's model, built on the meta device, without memory."""
    with torch.device("meta"):
        model = source.build()
    source.tie(model)
    frozen_base = set(source.frozen_base)
    names = {parameter: name for name, parameter in model.named_parameters()}
    modules = {module: name for name, module in model.named_modules()}
    blocks = source.blocks(model)
    left = {
        parameter: Weight(
            name=name,
            shape=tuple(parameter.shape),
            trained=parameter.requires_grad,
            frozen_base=name in frozen_base,
            packed=not parameter.is_floating_point(),
        )
        for parameter, name in names.items()
    }
    inside = {one for block in blocks for one in block.parameters()}
    order = {parameter: place for place, parameter in enumerate(names)}
    last = max((order[one] for one in inside), default=len(order))
    embedding, head = source.ends(model)
    return Structure(
        ends=(_weights_of(embedding, names), _weights_of(head, names)),
        behind=[names[one] for one in order if order[one] > last],
        # A weight that blocks share belongs to the first of them, the rest to the root.
        blocks=[[left.pop(one) for one in block.parameters() if one in left] for block in blocks],
        towers=[
            [left.pop(one) for one in block.parameters() if one in left]
            for block in source.tower_blocks(model)
        ],
        root=[*left.values()],
        names=[modules[block] for block in blocks],
        signatures=[
            (*((n, *_traits(one)) for n, one in block.named_modules()), _is_reached(block, order))
            for block in blocks
        ],
        tied=len([*model.named_parameters(remove_duplicate=False)]) > len(names),
    )


def _is_reached(block: nn.Module, order: Mapping[nn.Parameter, int]) -> bool:
    """Whether backward passes through a block to trained weights before it."""
    begin = min((order[one] for one in block.parameters()), default=0)
    return any(one.requires_grad for one, place in order.items() if place < begin)


def _weights_of(module: nn.Module | None, names: Mapping[nn.Parameter, str]) -> tuple[str, ...]:
    """Names of a module's weights."""
    return () if module is None else tuple(names[one] for one in module.parameters())


def _traits(module: nn.Module) -> tuple[Any, ...]:
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and key != "layer_idx"
    }
    own = module.named_parameters(recurse=False)
    shapes = tuple((name, tuple(one.shape), one.requires_grad) for name, one in own)
    replaced = getattr(vars(module).get("forward"), "__qualname__", "")
    return type(module).__name__, tuple(sorted(plain.items())), shapes, replaced


def kinds(signatures: Sequence[Any]) -> list[int]:
    """Number of each block's kind. The first block is a kind of its own: nothing before it may need
    a gradient."""
    known: dict[Any, int] = {}
    return [known.setdefault((n == 0, one), len(known)) for n, one in enumerate(signatures)]


class BareEngine(Engine):
    """A model in the compute dtype, whose gradients are dropped as soon as they are computed. Tied
    weights are separate, so that no gradient waits for another, and blocks are called with the
    compute dtype, as strategies that gather blocks do: both are up to the strategy."""

    def __init__(
        self, source: ModelSource, precision: Precision, topology: Topology, marks: Marks,
        division: Division | None = None,
    ) -> None:  # fmt: skip
        compute = torch_dtype(precision.compute)
        with with_values():
            with torch.device("meta"):
                model = source.build()
            source.tie(model)
            first = {parameter: name for name, parameter in model.named_parameters()}
            every = model.named_parameters(remove_duplicate=False)
            self.names = {name: first[parameter] for name, parameter in every}
            """Parameter -> the parameter it is tied to, or itself."""
            _cast(first, compute)
            if precision.buffer is not None:
                _cast(model.buffers(), torch_dtype(precision.buffer))
            self._division = division
            self.divided = Divided.of(division, model, source.blocks(model))
        self.model = model.to_empty(device="cpu").train()
        self.parts = (self.model,)
        self._scorer = source.scorer(self.model)
        self.device = torch.device("cpu")
        self.data_axis = DataAxis(index=0, count=topology.ranks)
        self.random_stream, self.random_streams = 0, topology.ranks

        self.deferred: dict[str, int] = {}
        """Bytes of gradients that a pipeline's backward in two halves defers, by parameter."""
        self._entrances: list[Node] = []

        def enter(module: nn.Module, inputs: Any, named: Any) -> Any:
            cast = cast_in((inputs, named), compute)
            made = (one.grad_fn for one in tensors_in(cast) if one.grad_fn is not None)
            self._entrances += itertools.islice(made, 1)
            return cast

        for block in source.blocks(self.model):
            block.register_forward_pre_hook(enter, with_kwargs=True)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self._drop_gradient(name, parameter, marks)

    def _drop_gradient(self, name: str, parameter: nn.Parameter, marks: Marks) -> None:
        def drop(parameter: Tensor) -> None:
            parameter.grad = None
            marks.part(name)

        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]

    def accumulate(
        self, batches: Iterable[MicroBatch], objective: Objective, *, counts: Mapping[Unit, float]
    ) -> LossParts:
        for batch in batches:
            self._entrances.clear()  # of blocks that were computed again
            own = batch if self._division is None else self._division.own(batch)
            terms = objective(self._scorer(own, own, objective.request), own).terms
            loss, *more = (term / counts[unit] for unit, term in terms.items())
            loss = sum(more, loss)
            if self._entrances and self._division is not None and self._division.stages > 1:
                trained = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
                self.deferred = deferred_gradients(loss, self._entrances[0], trained)
            self._entrances.clear()
            loss.backward()  # type: ignore[no-untyped-call]
        return LossParts(terms={unit: torch.zeros(()) for unit in objective.units})

    def step(
        self, *, lr_scales: Sequence[float], should_step: StepGuard | None = None
    ) -> StepReport:
        return StepReport(grad_norm=1.0, applied=False)

    def _absent(self, *given: Any) -> Any:
        """Refuse: a bare model has neither masters nor state."""
        raise NotImplementedError

    evaluate = describe = state = fragments = restore = sync_compute_weights = _absent  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Divided:
    """Result of dividing a model: the shape of each weight's part, the number of ranks that
    have different experts of a weight, and what is exchanged by the name of each group."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, division: Division | None, model: nn.Module, blocks: Sequence[nn.Module]
    ) -> Divided:
        """Divide a model on the meta device, whose parameters become this rank's parts."""
        if division is None:
            return cls()
        groups = division.divide(model, blocks)
        experts = division.experts(model)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    part = nn.Parameter(local(parameter).detach(), parameter.requires_grad)
                    module._parameters[name] = part
        named = model.named_parameters()
        shapes = {name: tuple(parameter.shape) for name, parameter in named}
        return cls(shapes=shapes, experts=experts, groups=groups)

    def part(self, weight: Weight) -> Weight:
        """This rank's part of a weight."""
        shape, experts = self.shapes.get(weight.name, weight.shape), self.experts
        if weight.packed or (shape == weight.shape and weight.name not in experts):
            return weight
        whole, among = weight.shape, experts.get(weight.name, 1)
        return replace(weight, shape=shape, whole=whole, experts=among)


def _cast(tensors: Any, dtype: torch.dtype) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def with_zero_weights(source: ModelSource) -> ModelSource:
    """A copy of a source, whose weights are zeros and are not read."""
    same = copy.copy(source)
    same.weights = ZeroReader  # type: ignore[method-assign]
    return same


class ZeroReader(TensorReader):
    """Reader of zeros. With uninitialised memory, gradients might not be finite, and some
    strategies leave such updates out."""

    as_stored = True

    def names(self) -> Collection[str]:
        return ()

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(shape=(), dtype=torch.float32)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        return iter(())

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        out.zero_()
