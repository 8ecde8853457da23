"""The shape of the model that a `model.hf` slot declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

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
    config = read_config(stage)
    shape = shape_of(config, again, tuple(_caveats(stage)), attention=stage.attention)
    return replace(shape, context=stated_context(config))


def require_possible(stage: HfModel) -> None:
    """Raise StageError for a config that cannot be read, or that no model of a known family can
    have: what is built of it would fail anywhere, or never end."""
    config = read_config(stage)
    if str(config.get("model_type")) in DEFAULTS:
        shape_of(config, None, ())


def stated_context(config: Mapping[str, Any]) -> int | None:
    """Positions that a config states, with those that scaling its rotary angles adds."""
    stated = config.get("max_position_embeddings", config.get("n_positions"))
    if type(stated) is not int or stated < 1:
        return None
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return stated
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isfinite(factor):
        return stated
    return max(stated, int(factor * (original if type(original) is int else stated)))


def _caveats(stage: HfModel) -> Iterator[str]:
    if stage.compile is not None:
        yield "compiled blocks keep less for backward than is counted here"
    if stage.fp8 is not None:
        yield "copies of weights and activations in 8 bits are not counted"
    if stage.kernels is not None:
        yield "fused kernels keep less for backward than is counted here"
