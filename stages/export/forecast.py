"""What an export takes, by arithmetic."""

from __future__ import annotations

from pipeline.forecast.phases import EXPORT
from pipeline.forecast.result import Exported, Host, Storage
from pipeline.forecast.shapes import ModelShape
from pipeline.forecast.sizes import BYTES

BUFFERS = 64 << 20
"""Bytes for what is on its way, and activations of a short prompt."""


def extras(dtype: str, model: ModelShape) -> Exported:
    """Disk for the weight files; host memory of rank 0's node for the proof, which holds what
    belongs to no block and one block at a time."""
    size = BYTES.get(dtype, BYTES["fp32"])
    whole, proven = _own(model)
    return Exported(
        host=[_proof(proven * size, f"{size} bytes x (what is outside of blocks + one block)")],
        storage=[
            Storage(what="export", bytes=whole * size, formula=f"{size} bytes a parameter"),
        ],
        loaded=whole * size,
    )


def adapter_extras(dtype: str, model: ModelShape) -> Exported:
    """The same of an adapter alone, which is proven in fp32, and loaded with its model, at most in
    fp32."""
    size = BYTES[dtype] * model.trained
    whole, proven = _own(model)
    wide = BYTES["fp32"]
    what = f"{wide} bytes x (what is outside of blocks + one block) + the adapter"
    return Exported(
        host=[_proof(proven * wide + size, what)],
        storage=[
            Storage(what="export", bytes=size, formula=f"{BYTES[dtype]} bytes a trained parameter"),
        ],
        loaded=whole * wide + size,
    )


def _own(model: ModelShape) -> tuple[int, int]:
    """Elements of the model without updates: of all of it, and of what a proof holds at a time."""
    root = sum(weight.elements for weight in model.root)
    blocks = [sum(weight.elements for weight in block.own) for block in model.blocks]
    return root + sum(blocks), root + max(blocks, default=0)


def _proof(size: int, formula: str) -> Host:
    return Host(
        phase=EXPORT,
        what="proof of the export",
        bytes=size + BUFFERS,
        formula=f"{formula} + 64 MiB",
    )
