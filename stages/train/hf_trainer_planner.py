"""Planner of `train.hf_trainer`: the common loop's batches under its own strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.artifacts import Precision
from pipeline.engine import Engine
from pipeline.length import Length
from pipeline.planning.estimate import Extras, HostNeed, Step, Storage
from pipeline.planning.planner import SMALLER, Extent, PhaseListener, Planner, Saving
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import OptimizerShape, SampleShape, Sizes
from pipeline.planning.strategy import StrategyMemory
from pipeline.planning.timeline import RESUME, SAVE
from pipeline.planning.topology import Topology
from pipeline.stage import Context
from pipeline.state.count import count
from pipeline.state.retention import Retention
from pipeline.throughput import human
from stages.train.causal_lm_planner import CausalLmPlanner
from stages.train.hf_trainer import HfTrainer
from stages.wrap.accelerate_planner import plainly_replicated

RECOMPUTED = ("activation_checkpointing", "gradient_checkpointing")
"""Arguments with which transformers computes every block again."""
FEWER = {
    "torch_compile": "compiled models, which keep less",
    "use_liger_kernel": "liger's kernels, which keep less",
}
"""Arguments -> what they do that is not followed."""


class HfTrainerPlanner(Planner[HfTrainer]):
    """Planner of `train.hf_trainer`, which wraps the model, trains it and keeps checkpoints."""

    def depends(self) -> Mapping[str, Any]:
        return {"recomputed": self._recomputes()}

    def _recomputes(self) -> bool:
        return any(self.stage.arguments.get(name) for name in RECOMPUTED)

    def savings(self, ranks: int) -> Iterator[Saving]:
        for saving in CausalLmPlanner(self.stage.batches()).savings(ranks):
            if saving.order == SMALLER:  # its loss is over all logits
                yield saving

    def profile(
        self,
        ctx: Context,
        engine: Engine,
        samples: SampleShape,
        extent: Extent,
        listener: PhaseListener,
    ) -> None:
        if self._recomputes():
            from stages.model.compat import compute_again

            compute_again(engine.model)
        CausalLmPlanner(self.stage.batches()).trace(ctx, engine, samples, extent, listener)

    def forecast(
        self,
        topology: Topology,
        profile: Profile,
        samples: SampleShape,
        precision: Precision,
        optimizer: OptimizerShape,
    ) -> tuple[StrategyMemory, Step, Extras]:
        strategy = plainly_replicated(topology, profile, precision, optimizer)
        step = CausalLmPlanner(self.stage.batches()).forecast(topology, samples)
        return strategy, step, self._extras(topology, profile, precision, optimizer)

    def _extras(
        self, topology: Topology, profile: Profile, precision: Precision, optimizer: OptimizerShape
    ) -> Extras:
        """Disk for checkpoints, which rank 0 writes; what GPUs' hosts take meanwhile."""
        model, config = profile.model, self.stage
        weights = model.stored * Sizes.by(precision).master
        moments = optimizer.state(model.trained)
        size = f"{human(weights)} of weights + {human(moments)} of moments"

        def saved(length: Length) -> Storage:
            found = count(Retention(last=config.keep), config.save_every, length)
            formula = f"{found.number} x ({size})"
            return Storage(
                what=str(found), bytes=found.number * (weights + moments), formula=formula
            )

        return Extras(
            saved=saved,
            host=[] if topology.device == "cpu" else [*_host(topology, weights, moments)],
            caveats=[what for name, what in FEWER.items() if config.arguments.get(name)],
        )


def _host(topology: Topology, weights: int, moments: int) -> Iterator[HostNeed]:
    """Weights go to host memory all at once before they are written, moments a tensor at a time.
    What is read goes through it to several GPUs in the same way, and is there whole for one."""
    yield HostNeed(
        phase=SAVE, what="copy of what is saved", bytes=weights, formula="weights in fp32"
    )
    if topology.ranks == 1:
        yield HostNeed(phase=RESUME, what="file that is read", bytes=moments, formula="all moments")
