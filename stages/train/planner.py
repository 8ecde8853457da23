"""Planner of `train.causal_lm`: samples of a step, and two steps without data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline import (
    Context,
    Engine,
    LossParts,
    MicroBatch,
    Objective,
    OptimizerPlan,
    Scores,
    planning,
)
from pipeline.planning import Planner, SampleShape, Saving, Step, Topology, TraceScope, Trial
from stages.train.causal_lm import TrainCausalLm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MICROBATCHES = 3
"""Micro-batches to trace; further ones are like the last but one."""


class CausalLmPlanner(Planner[TrainCausalLm]):
    """Planner of `train.causal_lm`."""

    def depends(self) -> Mapping[str, Any]:
        return {"loss_chunk_size": self.stage.loss_chunk_size}

    def for_benchmark(self, trial: Trial) -> TrainCausalLm:
        """The stage without evaluations and texts; the micro-batch is its own, or follows from the
        trial's `shares`."""
        return replace(
            self.stage,
            steps=trial.steps,
            epochs=None,
            global_batch_size=trial.grown(self.stage.global_batch_size),
            micro_batch_size=self.stage.microbatch_size(trial.shares),
            accumulation=None,
            eval_every=None,
            eval_first=False,
            eval_last=False,
            early_stopping=None,
            generate=None,
            result="last",
            anomalies=self.stage.anomalies.without_rollback(),
            profile_steps=trial.profile,
        )

    def savings(self, ranks: int) -> Iterator[Saving]:
        if self.stage.loss_chunk_size is None:
            what = "logits of 1024 tokens at a time"
            yield Saving(order=planning.CHUNK, what=what, fields={"loss_chunk_size": 1024})
        size = self.stage.microbatch_size(ranks)
        if size > 1:
            fields, what = {"micro_batch_size": size // 2}, "smaller micro-batches, more of them"
            yield Saving(order=planning.SMALLER, what=what, fields=fields)

    def forecast(self, topology: Topology, samples: SampleShape) -> Step:
        """An optimizer step as the loop divides it."""
        stage, ranks = self.stage, topology.data_ranks
        most = -(-stage.global_batch_size // ranks)
        size = min(stage.microbatch_size(ranks), most)
        return Step(
            microbatches=-(-most // size),
            micro_batch=size,
            of_rank=most,
            samples=stage.global_batch_size,
            tokens=stage.global_batch_size * samples.length,
            length=stage.length(),
        )

    def trace(
        self,
        ctx: Context,
        engine: Engine,
        topology: Topology,
        samples: SampleShape,
        optimizer: OptimizerPlan,
        scope: TraceScope,
    ) -> None:
        """Trace two steps as `TrainStep` takes them, or one micro-batch."""
        from stages.model.compat import masks_of_values
        from stages.objectives.cross_entropy import CrossEntropy
        from stages.wrap.experts_compat import balanced_routing

        step = self.forecast(topology, samples)
        batch = _batch(scope.samples or step.micro_batch, samples, engine.device)
        objective = Watched(CrossEntropy(self.stage.loss_chunk_size), scope)
        pipelined = len(engine.parts) > 1 or topology.stages > 1

        # A pipeline keeps several micro-batches at a time: which ones depends on their number.
        counts = (1, step.microbatches if pipelined else min(step.microbatches, MICROBATCHES))
        chunks = _chunks(scope.once)
        with (
            masks_of_values(packed=samples.packed), balanced_routing(), chunks,
            _forward_marked(engine, scope),
        ):  # fmt: skip
            # The first step makes the optimizer's state.
            for count in counts[:1] if scope.samples else counts:
                engine.accumulate([batch] * count, objective, counts={"targets": step.tokens})
                scope.phase(planning.UPDATE)
                engine.step(lr_scales=optimizer.lr_scales(1, 2), should_step=lambda norm: True)
        for phase in (planning.SAVE, planning.RESUME):  # with the memory between steps
            scope.phase(phase)


class Watched:
    """An objective after which backward begins."""

    def __init__(self, objective: Objective, scope: TraceScope) -> None:
        self.request, self.units = objective.request, objective.units
        self.metrics = objective.metrics
        self._objective, self._scope = objective, scope

    def __call__(self, scores: Scores, batch: MicroBatch) -> LossParts:
        parts = self._objective(scores, batch)
        self._scope.phase(planning.BACKWARD)
        return parts


@contextlib.contextmanager
def _forward_marked(engine: Engine, scope: TraceScope) -> Iterator[None]:
    """Mark the beginning of each forward pass in the body."""

    def begin(*given: Any) -> None:
        scope.phase(planning.FORWARD)

    hooks = [one.register_forward_pre_hook(begin, prepend=True) for one in engine.parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _chunks(once: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Compute one of a loss's equal chunks, which a long sample has thousands of, in the body."""
    from stages.objectives import chunked

    original = chunked._chunk

    def chunk(hidden: Tensor, *rest: Any) -> Any:
        rows = next(one for one in rest if isinstance(one, slice))
        size = min(rows.stop, len(hidden)) - rows.start
        return once(size, lambda: original(hidden, *rest))

    chunked._chunk = chunk  # type: ignore[assignment]
    try:
        yield
    finally:
        chunked._chunk = original


def _batch(size: int, samples: SampleShape, device: torch.device) -> MicroBatch:
    """A micro-batch; packed samples have documents of half the length."""
    import torch

    ids = torch.zeros(size, samples.length, dtype=torch.int64, device=device)
    half = torch.arange(samples.length, device=device) % max(samples.length // 2, 1)
    positions = half.expand(size, -1).contiguous() if samples.packed else None
    tokens = {"input_ids": ids, "labels": ids.clone()}
    return MicroBatch(tokens=tokens if positions is None else {**tokens, "positions": positions})
