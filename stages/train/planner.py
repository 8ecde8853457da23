"""Planners of the stages that train: samples of a step, and two steps without data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.artifacts import Precision
from pipeline.engine import Engine
from pipeline.planning import strategy
from pipeline.planning.estimate import Extras, Step
from pipeline.planning.planner import (
    CHUNK,
    SMALLER,
    Extent,
    PhaseListener,
    Planner,
    Saving,
    Topology,
)
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import BYTES, OptimizerShape, SampleShape
from pipeline.planning.strategy import StrategyMemory
from pipeline.stage import Context
from pipeline.state.retention import Retention
from stages.planners import checkpoints
from stages.train.causal_lm import TrainCausalLm
from stages.train.hf_trainer import HfTrainer
from stages.wrap.accelerate_planner import plainly_replicated

MICROBATCHES = 3
"""Further ones are like the last but one."""
RECOMPUTED = ("activation_checkpointing", "gradient_checkpointing")
"""Arguments with which transformers computes every block again."""
LEFT_OUT = ("torch_compile", "use_liger_kernel")
"""Arguments with which a model keeps less, which is not followed."""


class CausalLmPlanner(Planner[TrainCausalLm]):
    """Planner of `train.causal_lm`."""

    def depends(self) -> Mapping[str, Any]:
        return {"loss_chunk_size": self.stage.loss_chunk_size}

    def savings(self, ranks: int) -> Iterator[Saving]:
        if self.stage.loss_chunk_size is None:
            what = "the logits of 1024 tokens are there at a time"
            yield Saving(order=CHUNK, what=what, fields={"loss_chunk_size": 1024})
        size = self.stage.microbatch_size(ranks)
        if size > 1:
            half = size // 2
            what = f"micro-batches of {half} instead of {size}, more of them"
            yield Saving(order=SMALLER, what=what, fields={"micro_batch_size": half})

    def forecast(self, topology: Topology, samples: SampleShape) -> Step:
        return step_of(self.stage, topology, samples)

    def trace(
        self,
        ctx: Context,
        engine: Engine,
        topology: Topology,
        samples: SampleShape,
        extent: Extent,
        listener: PhaseListener,
    ) -> None:
        """Two steps as `train_step` makes them, or one micro-batch."""
        from stages.model.masks_compat import masks_of_values
        from stages.train.loss import SummedLoss

        step = step_of(self.stage, topology, samples)
        batch = _batch(extent.samples or step.micro_batch, samples, engine.device)
        self.prepare(engine.model)
        loss = SummedLoss(engine.model, self.stage.loss_chunk_size)
        counts = (1, min(step.microbatches, MICROBATCHES))
        with masks_of_values(packed=samples.packed):
            # The first step makes the optimizer's state.
            for count in counts[:1] if extent.samples else counts:
                for number in range(count):
                    listener.phase(strategy.FORWARD)
                    with engine.microbatch(last=number == count - 1):
                        summed = loss(batch)
                        listener.phase(strategy.BACKWARD)
                        engine.backward(summed * (topology.ranks / step.tokens))
                    del summed
                listener.phase(strategy.UPDATE)
                engine.step(lr_scale=1.0, admit=lambda norm: True)
        for phase in (strategy.SAVE, strategy.RESUME):  # which hold what there is between two steps
            listener.phase(phase)

    def prepare(self, model: Any) -> None:
        """Change a model as the stage itself does."""


def step_of(config: TrainCausalLm, topology: Topology, samples: SampleShape) -> Step:
    """An optimizer step as the common loop cuts it."""
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


def _batch(size: int, samples: SampleShape, device: Any) -> Any:
    """A micro-batch; in packed samples are documents of half the length."""
    import torch

    from stages.train.batches import MicroBatch

    ids = torch.zeros(size, samples.length, dtype=torch.int64, device=device)
    half = torch.arange(samples.length, device=device) % max(samples.length // 2, 1)
    positions = half.expand(size, -1).contiguous() if samples.packed else None
    return MicroBatch(input_ids=ids, labels=ids.clone(), positions=positions)


class HfTrainerPlanner(CausalLmPlanner):
    """Planner of `train.hf_trainer`: the common loop's batches, replicated as accelerate does."""

    def __init__(self, stage: HfTrainer) -> None:
        super().__init__(stage.batches())
        self._own = stage
        self._recomputes = any(stage.arguments.get(name) for name in RECOMPUTED)

    def depends(self) -> Mapping[str, Any]:
        return {"recomputed": self._recomputes}

    def savings(self, ranks: int) -> Iterator[Saving]:
        # Its loss is over all logits.
        yield from (one for one in super().savings(ranks) if one.order == SMALLER)

    def prepare(self, model: Any) -> None:
        from stages.model.compat import compute_again

        if self._recomputes:
            compute_again(model)

    def forecast(  # type: ignore[override]
        self,
        topology: Topology,
        samples: SampleShape,
        profile: Profile,
        precision: Precision,
        optimizer: OptimizerShape,
    ) -> tuple[StrategyMemory, Step, Extras]:
        share = plainly_replicated(topology, profile, precision, optimizer)
        model, own = profile.model, self._own
        size = model.stored * BYTES[precision.master] + optimizer.state(model.trained)
        saved = checkpoints(Retention(last=own.keep), own.save_every, size)
        saves = (f"what {name} saves" for name in LEFT_OUT if own.arguments.get(name))
        caveats = ["host memory that checkpoints pass through", *saves]
        step = step_of(self.stage, topology, samples)
        return share, step, Extras(saved=saved, caveats=caveats)
