"""What an export takes, by arithmetic."""

from __future__ import annotations

from pipeline.forecast.result import Extras, Host, Storage
from pipeline.forecast.shapes import ModelShape
from pipeline.forecast.sizes import BYTES

BUFFERS = 64 << 20
"""Bytes for what is on its way, and activations of a short prompt."""


def extras(dtype: str, model: ModelShape) -> Extras:
    """Disk for the weight files; host memory of rank 0's node for the proof, which holds what
    belongs to no block and one block at a time."""
    size = BYTES.get(dtype, BYTES["fp32"])
    root = sum(weight.elements for weight in model.root)
    blocks = [sum(weight.elements for weight in block.own) for block in model.blocks]
    return Extras(
        host=[
            Host(
                phase="export",
                what="proof of the export",
                bytes=(root + max(blocks, default=0)) * size + BUFFERS,
                formula=f"{size} bytes x (what is outside of blocks + one block) + 64 MiB",
            )
        ],
        storage=[
            Storage(
                what="export",
                bytes=(root + sum(blocks)) * size,
                formula=f"{size} bytes a parameter",
            )
        ],
    )
