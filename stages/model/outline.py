"""A declared model without memory for its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from pipeline.artifacts import ModelSource


def outline(source: ModelSource) -> nn.Module:
    """The source's module: parameters on the meta device, real buffers, weights tied."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = source.build()
    source.tie(model)
    return model
