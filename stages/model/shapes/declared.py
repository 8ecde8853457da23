"""The shape of the model that a `model.hf` slot declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.forecast.shapes import ModelShape, Recomputed
from stages.model.shapes.families import DEFAULTS, shape_of
from stages.model.shapes.read import read_config

if TYPE_CHECKING:
    from stages.model.hf import HfModel


def declared_shape(stage: HfModel) -> ModelShape:
    """Sizes of the model, and what is computed again. Raises StageError where they cannot be
    told."""
    asked = stage.activation_checkpointing
    again = None
    if asked is not None:
        again = Recomputed(every=asked.every, keep=asked.keep, offload=asked.offload)
    caveats = tuple(_caveats(stage))
    return shape_of(read_config(stage), again, caveats, attention=stage.attention)


def require_possible(stage: HfModel) -> None:
    """Raise StageError for a config that cannot be read, or that no model of a known family can
    have: what is built of it would fail anywhere, or never end."""
    config = read_config(stage)
    if str(config.get("model_type")) in DEFAULTS:
        shape_of(config, None, ())


def _caveats(stage: HfModel) -> Iterator[str]:
    if stage.compile is not None:
        yield "compiled blocks keep less for backward than is counted here"
    if stage.fp8 is not None:
        yield "copies of weights and activations in 8 bits are not counted"
    if stage.kernels is not None:
        yield "fused kernels keep less for backward than is counted here"
