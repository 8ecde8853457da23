"""Weights with their updates, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from pipeline.state.blocks import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.artifacts import TensorReader
    from stages.adapter.injection import Layer


def row_blocks(rows: int, columns: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """First and last row + 1 of the blocks of a few MiB in fp32 that hold elements [start, stop).

    Blocks lie at the same rows whatever is asked for, so that a value does not depend on it: how a
    product is summed depends on how many rows it has.
    """
    height = max(CHUNK // (4 * max(columns, 1)), 1)
    first = start // max(columns, 1) // height * height
    for top in range(first, rows, height):
        if top * columns >= stop:
            return
        yield top, min(top + height, rows)


def read_rows(reader: TensorReader, name: str, top: int, bottom: int, columns: int) -> Tensor:
    """Rows [top, bottom) in fp32, shape (bottom - top, columns)."""
    rows = torch.empty((bottom - top) * columns, dtype=torch.float32)
    reader.read_into(name, top * columns, rows)
    return rows.view(bottom - top, columns)


def updated(
    layer: Layer,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    magnitude: Tensor | None,
    top: int,
    bottom: int,
) -> Tensor:
    """Rows [top, bottom) of a weight, given in fp32, with the update in.

    W + s B A (Hu et al. 2021, section 4.1); under DoRA each row of that is then given its own
    length (Liu et al. 2024, eq. 5). A transposed weight has the update transposed.
    """
    if layer.transposed:
        return weight + layer.scaling * (down[:, top:bottom].T @ up.T)
    both = weight + layer.scaling * (up[top:bottom] @ down)
    if magnitude is None:
        return both
    lengths = torch.linalg.vector_norm(both, dim=1, keepdim=True)
    scaled: Tensor = magnitude[top:bottom, None] / lengths * both
    return scaled
