"""Planner of `train.causal_lm`: samples of a step, and a micro-batch without data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline import Context, MicroBatch, planning
from pipeline.planning import Planner, SampleShape, Saving, Step, Topology, TraceScope, Trial
from stages.train.causal_lm import TrainCausalLm

if TYPE_CHECKING:
    from torch import Tensor


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

    def trace(self, ctx: Context, samples: SampleShape, scope: TraceScope) -> None:
        from stages.objectives.cross_entropy import CrossEntropy

        with without_values(samples, scope.once):
            objective = CrossEntropy(self.stage.loss_chunk_size)
            scope.run(batch_of_zeros(scope.samples, samples), objective)


@contextlib.contextmanager
def without_values(
    samples: SampleShape, once: Callable[[Any, Callable[[], Any]], Any]
) -> Iterator[None]:
    """Run models and losses on tensors without values in the body: with the masks of real samples,
    tokens spread over all experts, and equal chunks of a loss counted `once` (`TraceScope`)."""
    from stages.model.compat import masks_of_values
    from stages.wrap.experts_compat import balanced_routing

    with masks_of_values(packed=samples.packed), balanced_routing(), _chunks(once):
        yield


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


def batch_of_zeros(size: int, samples: SampleShape) -> MicroBatch:
    """A micro-batch; packed samples have documents of half the length."""
    import torch

    ids = torch.zeros(size, samples.length, dtype=torch.int64)
    half = torch.arange(samples.length) % max(samples.length // 2, 1)
    positions = half.expand(size, -1).contiguous() if samples.packed else None
    tokens = {"input_ids": ids, "labels": ids.clone()}
    return MicroBatch(tokens=tokens if positions is None else {**tokens, "positions": positions})
