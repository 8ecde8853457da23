"""Planner of `train.causal_lm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.engine import Engine
from pipeline.planning.estimate import Step
from pipeline.planning.planner import CHUNK, SMALLER, Extent, PhaseListener, Planner, Saving
from pipeline.planning.shapes import SampleShape
from pipeline.planning.topology import Topology
from pipeline.stage import Context
from stages.train.causal_lm import TrainCausalLm


class CausalLmPlanner(Planner[TrainCausalLm]):
    """Planner of `train.causal_lm`."""

    def depends(self) -> Mapping[str, Any]:
        return {"loss_chunk_size": self.stage.loss_chunk_size}

    def savings(self, ranks: int) -> Iterator[Saving]:
        if self.stage.loss_chunk_size is None:
            yield Saving(
                order=CHUNK,
                what="the logits of 1024 tokens are there at a time",
                fields={"loss_chunk_size": 1024},
            )
        size = self.stage.microbatch_size(ranks)
        if size > 1:
            half = size // 2
            yield Saving(
                order=SMALLER,
                what=f"micro-batches of {half} instead of {size}, more of them",
                fields={"micro_batch_size": half},
            )

    def forecast(self, topology: Topology, samples: SampleShape) -> Step:
        config = self.stage
        most = -(-config.global_batch_size // topology.ranks)
        size = min(config.microbatch_size(topology.ranks), most)
        return Step(
            microbatches=-(-most // size),
            micro_batch=size,
            of_rank=most,
            samples=config.global_batch_size,
            tokens=config.global_batch_size * samples.length,
            length=config.length(),
        )

    def trace(
        self,
        ctx: Context,
        engine: Engine,
        samples: SampleShape,
        extent: Extent,
        listener: PhaseListener,
    ) -> None:
        from stages.train.rehearsed_steps import train

        train(self.stage, engine, samples, extent, listener)
