"""A recipe's model without a strategy: its structure, and a run on tensors without memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline.chain.artifacts import Results
from pipeline.contracts.data import MicroBatch
from pipeline.contracts.model import ModelSource
from pipeline.contracts.objective import Objective
from pipeline.contracts.optimizer import Precision, torch_dtype
from pipeline.contracts.stage import Context
from pipeline.contracts.training import TrainedRun
from pipeline.errors import PipeError, StageError, UsageError
from pipeline.execution.in_process import scratch_context
from pipeline.planning.forecast import BACKWARD, FORWARD, LOAD, UPDATE
from pipeline.planning.planner import Job, TraceScope
from pipeline.planning.shapes import Weight
from pipeline.planning.trace import tracker as tracking
from pipeline.planning.trace.torch_compat import cast_in, local, silent_group, tensors_in
from pipeline.planning.trace.tracker import HEAD, INPUT, LOSS, START, MemoryTracker, Part
from pipeline.utils.tensors import with_values, without_values


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A model's weights and blocks. root: weights outside of blocks, tied ones once; `tied` says
    whether two of their names share one. towers: weights of the blocks of other parts than the
    language model. signatures: everything that distinguishes a block from others but its number.
    `behind`, ends: as in `ModelShape`."""

    root: Sequence[Weight]
    blocks: Sequence[Sequence[Weight]]
    towers: Sequence[Sequence[Weight]]
    signatures: Sequence[Any]
    tied: bool
    behind: Sequence[str]
    ends: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def weights(self) -> Sequence[Weight]:
        return [*self.root, *itertools.chain(*self.towers, *self.blocks)]


def structure(source: ModelSource) -> Structure:
    """Structure of a source's model, built on the meta device, without memory."""
    with torch.device("meta"):
        model = source.build()
    source.tie(model)
    frozen_base, blocks = set(source.frozen_base), source.blocks(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    left = {
        one: Weight(
            name=name, shape=tuple(one.shape), trained=one.requires_grad,
            frozen_base=name in frozen_base, packed=not one.is_floating_point(),
        )
        for one, name in names.items()
    }  # fmt: skip
    order = {parameter: place for place, parameter in enumerate(names)}
    inside = [order[one] for block in blocks for one in block.parameters()]
    first_trained = min((n for one, n in order.items() if one.requires_grad), default=len(order))

    def taken(module: nn.Module) -> list[Weight]:
        # A weight that blocks share belongs to the first of them, the rest to the root.
        return [left.pop(one) for one in module.parameters() if one in left]

    signatures = []
    for block in blocks:
        # Backward passes through a block only to trained weights before it.
        begin = min((order[one] for one in block.parameters()), default=0)
        parts = ((name, *_traits(one)) for name, one in block.named_modules())
        signatures.append((*parts, first_trained < begin))
    embedding, head = (
        () if end is None else tuple(names[one] for one in end.parameters())
        for end in source.ends(model)
    )
    return Structure(
        blocks=[*map(taken, blocks)],
        towers=[*map(taken, source.tower_blocks(model))],
        root=[*left.values()],
        ends=(embedding, head),
        behind=[names[one] for one in order if order[one] > max(inside, default=len(order))],
        signatures=signatures,
        tied=len([*model.named_parameters(remove_duplicate=False)]) > len(names),
    )


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
    """Number of each block's kind. The first is separate: nothing before it may need a gradient."""
    known: dict[Any, int] = {}
    return [known.setdefault((n == 0, one), len(known)) for n, one in enumerate(signatures)]


def run(job: Job, scope: TraceScope) -> BareModel:
    """Run a micro-batch on one rank. Raises UsageError if nothing is trained, and StageError."""
    tracker, results = MemoryTracker(fake=True), Results.of(job.topology, job.samples, scope)
    with contextlib.ExitStack() as stack:
        ctx = stack.enter_context(context(job))
        if job.division is not None:
            stack.enter_context(silent_group(job.topology.ranks))
        source = declare(job, results, ctx)
        precision = results.require(Precision, "no slot of the recipe provides a precision")
        stack.enter_context(tracking.offloading(tracker, job.topology.device))
        stack.enter_context(without_values())
        stack.enter_context(tracker)
        stack.enter_context(model_errors_as_ours())
        bare = BareModel(job, source, precision, tracker)
        results |= Results.of(replace(scope, once=tracker.once, run=bare.run))
        _give(job, results, ctx, (TrainedRun,), "trace")
        if tracker.stretches[-1].phase == LOAD:
            raise UsageError("nothing is trained that could be traced")
    return bare


class BareModel:
    """A model in the compute dtype, whose gradients are dropped as soon as they are computed. Tied
    weights are separate, and blocks are called with the compute dtype: both are up to the strategy.
    Tells a tracker which phase and which part of the model runs. groups: what is exchanged by the
    name of each group; experts: number of ranks with different experts of a weight."""

    def __init__(
        self, job: Job, source: ModelSource, precision: Precision, tracker: MemoryTracker
    ) -> None:
        self.source, self.stretches = source, tracker.stretches
        self._division, self._tracker = job.division, tracker
        self._phase, self._part = LOAD, cast(Part, START)
        self.groups: Mapping[str, str] = {}
        self.experts: Mapping[str, int] = {}
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        with with_values():
            self.built = structure(source)
            with torch.device("meta"):
                model = source.build()
            source.tie(model)
            first = {parameter: name for name, parameter in model.named_parameters()}
            every = model.named_parameters(remove_duplicate=False)
            names = {name: first[parameter] for name, parameter in every}
            """Parameter -> the parameter it is tied to, or itself."""
            for dtype, tensors in ((precision.compute, first), (precision.buffer, model.buffers())):
                for tensor in tensors:
                    if dtype is not None and tensor.is_floating_point():
                        tensor.data = tensor.data.to(torch_dtype(dtype))
            if job.division is not None:  # parameters become this rank's parts
                self.groups, self.experts = job.division.divide(model, source.blocks(model))
                for module in model.modules():
                    for name, one in module._parameters.items():
                        if one is not None:
                            part = nn.Parameter(local(one).detach(), one.requires_grad)
                            module._parameters[name] = part
                self._shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        self._model = model.to_empty(device="cpu").train()
        self._scorer = source.scorer(self._model)
        self._watch(source.blocks(self._model), names, torch_dtype(precision.compute))

    def part(self, weight: Weight) -> Weight:
        shape, among = self._shapes.get(weight.name, weight.shape), self.experts.get(weight.name, 1)
        if weight.packed or (shape == weight.shape and among == 1):
            return weight
        return replace(weight, shape=shape, whole=weight.shape, experts=among)

    def run(self, batch: MicroBatch, objective: Objective) -> None:
        own = batch if self._division is None else self._division.own(batch)
        terms = objective(self._scorer(own, own, objective.request), own).terms
        self._enter(START, BACKWARD)
        loss, *more = (term / 1.0 for term in terms.values())  # an engine divides by its counts
        sum(more, loss).backward()  # type: ignore[no-untyped-call]
        self._enter(START, UPDATE)

    def _enter(self, part: Part, phase: str | None = None, given: str = "") -> None:
        self._phase, self._part = phase or self._phase, part
        self._tracker.enter(self._phase, part, given)

    def _watch(self, blocks: Sequence[nn.Module], names: Any, compute: torch.dtype) -> None:
        """Enter each part as its module is called, and as backward comes to its output."""

        def mark(tensors: Any, part: Part) -> None:
            first = next((one for one in tensors_in(tensors) if one.is_floating_point()), None)
            if first is not None and first.requires_grad:
                first.register_hook(lambda _: self._enter(part))  # type: ignore[no-untyped-call]

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self._enter(LOSS)
            mark(output, HEAD)

        def before_block(place: int, module: nn.Module, inputs: Any, named: Any) -> Any:
            cast = cast_in((inputs, named), compute)
            self._enter(place)
            if place == 0:
                mark(cast, INPUT)
            return cast

        def after_block(place: int, module: nn.Module, inputs: Any, output: Any) -> None:
            mark(output, place)
            if place == len(blocks) - 1:
                self._enter(HEAD)

        def drop(name: str, parameter: Tensor) -> None:
            parameter.grad = None
            self._enter(self._part, given=names[name])

        begin = functools.partial(self._enter, START, FORWARD)
        self._model.register_forward_pre_hook(lambda *_: begin(), prepend=True)
        self._model.register_forward_hook(after)
        for place, block in enumerate(blocks):
            before = functools.partial(before_block, place)
            block.register_forward_pre_hook(before, with_kwargs=True)
            block.register_forward_hook(functools.partial(after_block, place))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(drop, name))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def context(job: Job, rank: int = 0) -> Iterator[Context]:
    """Inside, stages can run as one rank of all, without a log, in a temporary folder."""
    log, each = logging.Logger("pipe.planning"), job.topology.local_ranks
    log.addHandler(logging.NullHandler())
    with scratch_context(log, seed=job.plan.view.seed) as ctx:
        place = replace(
            ctx.dist, rank=rank, world_size=job.topology.ranks, local_rank=rank % each,
            local_world_size=each,
        )  # fmt: skip
        yield replace(ctx, dist=place)


@contextlib.contextmanager
def model_errors_as_ours() -> Iterator[None]:
    """Raise any error of a model's own code, such as one that needs values, as StageError."""
    try:
        yield
    except PipeError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StageError(
            f"the model cannot be run on tensors without values: {first}",
            hint="if it trains all the same, `pipe bench` measures its memory",
        ) from error


def declare(job: Job, results: Results, ctx: Context) -> ModelSource:
    """Run the stages that give declarations, on real tensors. Raises UsageError without a model."""
    with model_errors_as_ours():
        _give(job, results, ctx, (ModelSource, Precision), "trace", "run")
    return results.require(ModelSource, "no slot of the recipe provides a model to trace")


def _give(job: Job, results: Results, ctx: Context, gives: tuple[type, ...], *methods: str) -> None:
    """Run the stages that give one of these types, by the first of `methods` that each has. Raises
    UsageError for a stage that lacks an input."""
    for planned in job.plan.slots:
        owners = {"trace": job.planners.get(planned.slot), "run": planned.stage}
        found = [(owners[method], method) for method in methods if hasattr(owners[method], method)]
        if found and issubclass(planned.gives or object, gives):
            missing = results.missing(*found[0])
            if missing:
                raise UsageError(f"slot `{planned.slot}` cannot be traced without {missing[0]}")
            results[planned.slot] = results.call(*found[0], ctx)
