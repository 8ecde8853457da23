"""What canonical checkpoints take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.artifacts import Precision
from pipeline.forecast.result import Extras, Host, Storage
from pipeline.forecast.shapes import ModelShape, OptimizerShape
from pipeline.forecast.site import Site
from pipeline.forecast.sizes import BYTES
from pipeline.length import Length
from pipeline.state.count import count
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
) -> Extras:
    """Host memory for the copy that is written, each rank its share; disk for as many as there will
    be at once."""
    size = state_bytes(model, precision, optimizer)
    local = min(site.local_ranks, site.ranks)

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
                bytes=-(-size // site.ranks) * local,
                formula=f"state / {site.ranks} ranks x {local} of a node",
            )
        ],
        saved=saved,
    )


def state_bytes(model: ModelShape, precision: Precision, optimizer: OptimizerShape) -> int:
    """Bytes of a checkpoint: weights that are not borrowed, and moments of those that are
    trained."""
    bits = optimizer.bits / optimizer.moments
    moment = (bits if bits >= NARROWEST else 32) / 8
    weights = sum(weight.elements for weight in model.weights() if not weight.borrowed)
    moments = model.trained * optimizer.moments * moment
    return round(weights * BYTES[precision.master] + moments)
