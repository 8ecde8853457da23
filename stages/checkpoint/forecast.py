"""What canonical checkpoints take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.artifacts import Precision
from pipeline.forecast.placement import Placement
from pipeline.forecast.result import Extras, Host, Storage
from pipeline.forecast.shapes import ModelShape, OptimizerShape
from pipeline.forecast.site import Site
from pipeline.forecast.sizes import BYTES
from pipeline.length import Length
from pipeline.state.count import count
from pipeline.state.staging import PASSAGE
from pipeline.throughput import human

if TYPE_CHECKING:
    from stages.checkpoint.settings import CheckpointSettings

NARROWEST = 16
"""Bits of a moment that is saved as it is kept; of fewer, its values are saved in fp32."""


def extras(
    stage: CheckpointSettings,
    site: Site,
    model: ModelShape,
    precision: Precision,
    optimizer: OptimizerShape,
    placement: Placement,
) -> Extras:
    """Host memory for what is copied to be written, each rank of its share; disk for as many
    checkpoints as there will be at once."""
    trained = trained_bytes(model, precision, optimizer) + placement.averaged * model.trained
    size = state_bytes(model, precision, optimizer) + placement.averaged * model.trained
    local = min(site.local_ranks, site.ranks)
    all_passes = site.device == "cpu" or not stage.asynchronous
    on_host = placement.masters[1] != "device"
    passing = size if all_passes else trained if on_host else 0
    share, passing = (-(-part // site.ranks) for part in (size - passing, passing))

    def saved(length: Length) -> Storage:
        found = count(stage.retention, stage.every, length)
        return Storage(
            what=str(found),
            bytes=found.number * size,
            formula=f"{found.number} x {human(size)}",
        )

    return Extras(
        host=[
            Host(
                phase="",
                what="copy for checkpoints",
                bytes=(share + min(passing, PASSAGE)) * local,
                formula=f"({human(share)} + at most {human(PASSAGE)} of {human(passing)} that "
                f"passes) x {local} ranks of a node",
            )
        ],
        saved=saved,
    )


def state_bytes(model: ModelShape, precision: Precision, optimizer: OptimizerShape) -> int:
    """Bytes of a checkpoint without averages: weights that are not borrowed, and moments of those
    that are trained."""
    weights = sum(weight.elements for weight in model.weights() if not weight.borrowed)
    frozen = (weights - model.trained) * BYTES[precision.master]
    return frozen + trained_bytes(model, precision, optimizer)


def trained_bytes(model: ModelShape, precision: Precision, optimizer: OptimizerShape) -> int:
    """Bytes of these that are masters and moments of what is trained."""
    bits = optimizer.bits / optimizer.moments
    moment = (bits if bits >= NARROWEST else 32) / 8
    return round(model.trained * (BYTES[precision.master] + optimizer.moments * moment))
