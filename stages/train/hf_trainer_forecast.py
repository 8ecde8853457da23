"""What a training by the Trainer takes: the common loop's story under its own strategy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.artifacts import Precision
from pipeline.forecast.phases import RESUME, SAVE
from pipeline.forecast.placement import Placement
from pipeline.forecast.result import Extras, Host, Step, Storage
from pipeline.forecast.shapes import ModelShape, OptimizerShape, Recomputed, SampleShape
from pipeline.forecast.site import Site
from pipeline.forecast.sizes import Sizes
from pipeline.length import Length
from pipeline.state.count import count
from pipeline.state.retention import Retention
from pipeline.throughput import human
from stages.train.story import tell
from stages.wrap.accelerate_placement import replicated

if TYPE_CHECKING:
    from stages.train.hf_trainer import HfTrainer

RECOMPUTED = ("activation_checkpointing", "gradient_checkpointing")
"""Arguments with which transformers computes every block again."""
FEWER = {
    "torch_compile": "compiled models, which keep less",
    "use_liger_kernel": "liger's kernels, which keep less",
}
"""Arguments -> what they do that arithmetic does not follow."""


def forecast(
    config: HfTrainer,
    site: Site,
    model: ModelShape,
    data: SampleShape,
    precision: Precision,
    optimizer: OptimizerShape,
) -> tuple[Placement, Step, Extras]:
    """The Trainer wraps the model, trains it and keeps checkpoints."""
    if any(config.arguments.get(name) for name in RECOMPUTED):
        model = replace(model, recomputed=Recomputed())
    placement = replicated(site, model, precision, optimizer)
    step = tell(config.batches(), site, model, data, precision, optimizer, placement)
    return placement, step, _extras(config, site, model, precision, optimizer)


def _extras(
    config: HfTrainer,
    site: Site,
    model: ModelShape,
    precision: Precision,
    optimizer: OptimizerShape,
) -> Extras:
    """Disk for checkpoints, which rank 0 writes; what GPUs' hosts take meanwhile."""
    own = sum(weight.elements for weight in model.weights() if not weight.borrowed)
    weights, moments = own * Sizes.of(precision).master, optimizer.state(model.trained)
    size = f"{human(weights)} of weights + {human(moments)} of moments"

    def saved(length: Length) -> Storage:
        found = count(Retention(last=config.keep), config.save_every, length)
        return Storage(
            what=str(found),
            bytes=found.number * (weights + moments),
            formula=f"{found.number} x ({size})",
        )

    return Extras(
        saved=saved,
        host=[] if site.device == "cpu" else list(_host(site, weights, moments)),
        caveats=[what for name, what in FEWER.items() if config.arguments.get(name)],
    )


def _host(site: Site, weights: int, moments: int) -> Iterator[Host]:
    """Weights go to host memory all at once before they are written, moments a tensor at a time.
    What is read goes through it to several GPUs in the same way, and is there whole for one."""
    yield Host(phase=SAVE, what="copy of what is saved", bytes=weights, formula="weights in fp32")
    if site.ranks == 1:
        yield Host(phase=RESUME, what="file that is read", bytes=moments, formula="all moments")
