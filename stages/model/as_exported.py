"""A trained model's tensors as an export has them, and whether its source still is the one that was
trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pipeline import Context, ExportError, ModelSource, TensorReader, TrainedRun, torch_dtype
from stages.model.declared import misfit, outline, refuse_differences, ties
from stages.weights.change import renamed
from stages.weights.converted import ConvertedReader
from stages.weights.views import CastReader

if TYPE_CHECKING:
    from torch import nn

AS_SOURCE = "source"
"""In place of a dtype: each tensor keeps that of the source."""


def module_tensors(
    source: ModelSource, weights: TensorReader, dtype: str
) -> tuple[nn.Module, TensorReader]:
    """The source's module on the meta device, and its tensors by its names, in `dtype` of an export
    or AS_SOURCE; tied ones once. Raises StageError when names or shapes differ."""
    model = outline(source)
    names = names_to_read(model, weights)
    chosen = ConvertedReader(weights, [renamed(found, kept) for kept, found in names.items()])
    return model, CastReader(chosen, _dtypes(dtype, source, model))


def names_to_read(outline: nn.Module, weights: TensorReader) -> dict[str, str]:
    """Name to write -> name to read, for each tensor of `outline`, a module on the meta device with
    its weights tied; a tied tensor once, under the name that files keep. Raises StageError when
    names or shapes of `weights` differ from the module's."""
    tied = ties(outline)
    given = set(weights.names())
    expected = outline.state_dict()
    found: dict[str, str] = {}
    for name in expected:
        kept = tied.get(name, name)
        if name in given and (kept not in found or name == kept):
            found[kept] = name
    missing = {name for name in expected if tied.get(name, name) not in found}
    shapes = {kept: (weights.spec(name).shape, tuple(expected[kept].shape))
              for kept, name in found.items()}  # fmt: skip
    misshapen = [misfit(name, has, needs) for name, (has, needs) in shapes.items() if has != needs]
    extra = given - expected.keys()
    refuse_differences("the checkpoint", outline, missing, extra, misshapen)
    return {name: found[name] for name in expected if name in found}


def _dtypes(asked: str, source: ModelSource, model: nn.Module) -> Callable[[str], torch.dtype]:
    if asked != AS_SOURCE:
        one = torch_dtype(asked)
        return lambda name: one
    with contextlib.closing(source.weights()) as reader:
        own = {name: reader.spec(name).dtype for name in reader.names()}
    own |= {kept: own[alias] for alias, kept in ties(model).items() if kept not in own}
    return own.__getitem__


def require_same_base(
    ctx: Context,
    model: ModelSource,
    trained: TrainedRun,
    otherwise: str = "if that is intended: --accept weights",
) -> None:
    """Raise ExportError when weights that come from the model's source are not those that were
    trained on; its hint ends with what may be done `otherwise`."""
    then = trained.progress.lineage.get("weights")
    if not needs_source(model) or then is None or "weights" in ctx.accept:
        return
    if model.contents != then:
        raise ExportError(
            f"the weights of {model.name} are not those that were trained on: their digest was "
            f"{then[:12]}, is {str(model.contents)[:12]}",
            hint=f"put back the files, or {otherwise}",
        )


def needs_source(model: ModelSource) -> bool:
    """Whether tensors of the model's source are exported or merged."""
    passed = model.export_view.passed_through()
    if passed is not None:
        passed.close()
    return passed is not None or bool(model.frozen_base)
