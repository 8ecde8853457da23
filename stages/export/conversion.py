"""The trained weights as the architecture's files have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.artifacts import TensorReader, Weights
from pipeline.errors import StageError
from pipeline.state.dtypes import CODES
from stages.model import compat
from stages.model.names import misfit, refuse_differences, ties
from stages.weights.cast import CastReader
from stages.weights.change import renamed
from stages.weights.converted import ConvertedReader

if TYPE_CHECKING:
    import torch
    from torch import nn


def module_weights(
    outline: nn.Module, weights: Weights, dtype: Callable[[str], torch.dtype]
) -> TensorReader:
    """The tensors of `outline`, a module on the meta device with its weights tied: each once, under
    the name that files keep, in the dtype that `dtype` gives that name.

    Raises StageError when names or shapes of `weights` differ from the module's.
    """
    names = _spelling(outline, weights)
    chosen = ConvertedReader(weights, [renamed(found, kept) for kept, found in names.items()])
    return CastReader(chosen, dtype)


def file_weights(outline: nn.Module, tensors: TensorReader) -> TensorReader:
    """What `module_weights` gave, under the names and with the shapes that files have."""
    reader = ConvertedReader(tensors, compat.changes_on_save(outline, tensors.names()))
    for name in reader.names():
        dtype = reader.spec(name).dtype
        if dtype not in CODES:
            raise StageError(f"{name} has dtype {dtype}, which safetensors files cannot hold")
    return reader


def _spelling(outline: nn.Module, weights: Weights) -> dict[str, str]:
    """Name to write -> name to read; a tied tensor once, under the name that files keep."""
    tied = ties(outline)
    given = set(weights.names())
    expected = outline.state_dict()
    found: dict[str, str] = {}
    for name in expected:
        kept = tied.get(name, name)
        if name in given and (kept not in found or name == kept):
            found[kept] = name
    missing = {name for name in expected if tied.get(name, name) not in found}
    shapes = {kept: (tuple(expected[kept].shape), weights.spec(name).shape)
              for kept, name in found.items()}  # fmt: skip
    misshapen = [misfit(name, has, needs) for name, (needs, has) in shapes.items() if has != needs]
    extra = given - expected.keys()
    if any(".lora_" in name for name in extra):
        raise StageError(
            "the checkpoint holds an adapter (LoRA), without the model that it changes",
            hint="export the run that saved it: its recipe says what is merged, and how",
        )
    refuse_differences("the checkpoint", outline, missing, extra, misshapen)
    return {name: found[name] for name in expected if name in found}
