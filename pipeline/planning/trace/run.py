"""Run a micro-batch of a recipe's model, without a strategy, on tensors without memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pipeline.chain.binding import Results
from pipeline.contracts.data import MicroBatch
from pipeline.contracts.model import ModelSource
from pipeline.contracts.objective import Objective
from pipeline.contracts.precision import Precision, torch_dtype
from pipeline.contracts.stage import Context
from pipeline.contracts.training import TrainedRun
from pipeline.errors import PipeError, StageError, UsageError
from pipeline.execution.in_process import scratch_context
from pipeline.planning.forecast import BACKWARD, FORWARD, LOAD, UPDATE
from pipeline.planning.planner import Job, TraceScope
from pipeline.planning.shapes import Division
from pipeline.planning.trace.model import Divided, Structure, structure
from pipeline.planning.trace.torch_compat import (
    cast_in,
    deferred_gradients,
    silent_group,
    tensors_in,
)
from pipeline.planning.trace.tracker import (
    HEAD,
    INPUT,
    LOSS,
    START,
    MemoryTracker,
    Part,
    Position,
    offloading,
)
from pipeline.utils.tensors import with_values, without_values

DECLARATIONS = (ModelSource, Precision)
TRACE, RUN = "trace", "run"
"""Methods: a planner's `trace` replaces its stage's `run`."""


def declared(job: Job) -> ModelSource:
    """The model that a recipe declares, in full depth. Raises UsageError for a recipe without."""
    with context(job) as ctx:
        return declare(job, Results.of(TraceScope()), ctx)


def run(job: Job, scope: TraceScope) -> BareModel:
    """Run a micro-batch of a job's model on one rank. Raises UsageError if nothing is trained, and
    StageError for a model that needs values."""
    tracker = MemoryTracker(fake=True)
    results = Results.of(job.topology, job.samples, scope)
    with contextlib.ExitStack() as stack:
        ctx = stack.enter_context(context(job))
        if job.division is not None:
            stack.enter_context(silent_group(job.topology.ranks))
        source = declare(job, results, ctx)
        built = structure(source)
        stack.enter_context(offloading(tracker, job.topology.device))
        stack.enter_context(without_values())
        stack.enter_context(tracker)
        stack.enter_context(model_errors_as_ours())
        precision = results.require(Precision, "no slot of the recipe provides a precision")
        bare = BareModel(source, built, precision, job.division, tracker)
        results |= Results.of(replace(scope, once=tracker.once, run=bare.run))
        _give(job, results, ctx, (TrainedRun,), TRACE)
        if tracker.stretches[-1].position.phase == LOAD:
            raise UsageError("nothing is trained that could be traced")
    return bare


class BareModel:
    """A model in the compute dtype, whose gradients are dropped as soon as they are computed. Tied
    weights are separate, so that no gradient waits for another, and blocks are called with the
    compute dtype, as strategies that gather blocks do: both are up to the strategy. Reports to a
    tracker which phase and which part of the model runs."""

    def __init__(
        self, source: ModelSource, built: Structure, precision: Precision,
        division: Division | None, tracker: MemoryTracker,
    ) -> None:  # fmt: skip
        self.source, self.built, self.stretches = source, built, tracker.stretches
        self._division, self._tracker, self._phase = division, tracker, LOAD
        self._compute = torch_dtype(precision.compute)
        with with_values():
            with torch.device("meta"):
                model = source.build()
            source.tie(model)
            first = {parameter: name for name, parameter in model.named_parameters()}
            every = model.named_parameters(remove_duplicate=False)
            self.names = {name: first[parameter] for name, parameter in every}
            """Parameter -> the parameter it is tied to, or itself."""
            _cast(first, self._compute)
            if precision.buffer is not None:
                _cast(model.buffers(), torch_dtype(precision.buffer))
            self.divided = Divided.of(division, model, source.blocks(model))
        self._model = model.to_empty(device="cpu").train()
        self._scorer = source.scorer(self._model)
        self.deferred: dict[str, int] = {}
        """Bytes of gradients that a pipeline's backward in two halves defers, by parameter."""
        self._entrances: list[Node] = []
        self._watch(source.blocks(self._model))

    def run(self, batch: MicroBatch, objective: Objective) -> None:
        """Run a micro-batch forward and backward."""
        self._step(batch, objective)
        self._begin(UPDATE)

    def _step(self, batch: MicroBatch, objective: Objective) -> None:
        own = batch if self._division is None else self._division.own(batch)
        terms = objective(self._scorer(own, own, objective.request), own).terms
        self._begin(BACKWARD)
        loss, *more = (term / 1.0 for term in terms.values())  # an engine divides by its counts
        loss = sum(more, loss)
        if self._entrances and self._division is not None and self._division.stages > 1:
            trained = ((n, p) for n, p in self._model.named_parameters() if p.requires_grad)
            self.deferred = deferred_gradients(loss, self._entrances[0], trained)
        self._entrances.clear()
        loss.backward()  # type: ignore[no-untyped-call]

    def _begin(self, phase: str) -> None:
        self._phase = phase
        self._enter(START)

    def _enter(self, part: Part) -> None:
        self._tracker.enter(Position(self._phase, part))

    def _mark(self, tensors: Any, part: Part) -> None:
        """Begin the part when backward gives the first of these tensors its gradient."""
        first = next((one for one in tensors_in(tensors) if one.is_floating_point()), None)
        if first is not None and first.requires_grad:
            first.register_hook(lambda _: self._enter(part))  # type: ignore[no-untyped-call]

    def _watch(self, blocks: Sequence[nn.Module]) -> None:
        def before(*_: Any) -> None:
            self._begin(FORWARD)

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self._enter(LOSS)
            self._mark(output, HEAD)

        self._model.register_forward_pre_hook(before, prepend=True)
        self._model.register_forward_hook(after)
        for place, block in enumerate(blocks):
            self._watch_block(place, block, last=place == len(blocks) - 1)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                drop = functools.partial(self._drop_gradient, name)
                parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]

    def _watch_block(self, place: int, block: nn.Module, *, last: bool) -> None:
        def before(module: nn.Module, inputs: Any, named: Any) -> Any:
            cast = cast_in((inputs, named), self._compute)
            made = (one.grad_fn for one in tensors_in(cast) if one.grad_fn is not None)
            self._entrances += itertools.islice(made, 1)
            self._enter(place)
            if place == 0:
                self._mark(cast, INPUT)
            return cast

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self._mark(output, place)
            if last:
                self._enter(HEAD)

        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after)

    def _drop_gradient(self, name: str, parameter: Tensor) -> None:
        parameter.grad = None
        self._enter(name)


def _cast(tensors: Any, dtype: torch.dtype) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


@contextlib.contextmanager
def context(job: Job, rank: int = 0) -> Iterator[Context]:
    """Inside, stages can run as one rank of all, without a log, in a temporary folder."""
    log, local = logging.Logger("pipe.planning"), job.topology.local_ranks
    log.addHandler(logging.NullHandler())
    with scratch_context(log, seed=job.plan.view.seed) as ctx:
        place = replace(
            ctx.dist, rank=rank, world_size=job.topology.ranks, local_rank=rank % local,
            local_world_size=local,
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
        _give(job, results, ctx, DECLARATIONS, TRACE, RUN)
    return results.require(ModelSource, "no slot of the recipe provides a model to trace")


def _give(job: Job, results: Results, ctx: Context, gives: tuple[type, ...], *methods: str) -> None:
    """Run the stages that give one of these types, by the first of `methods` that each has. Raises
    UsageError for a stage that lacks an input."""
    for step in job.plan.steps:
        owners = {TRACE: job.planners.get(step.slot), RUN: step.stage}
        found = [(owners[method], method) for method in methods if hasattr(owners[method], method)]
        if found and issubclass(step.gives or object, gives):
            missing = results.missing(*found[0])
            if missing:
                raise UsageError(f"slot `{step.slot}` cannot be traced without {missing[0]}")
            results[step.slot] = results.call(*found[0], ctx)
