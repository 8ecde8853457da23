"""Serve tensors from a model that transformers loaded whole: for formats that it has to convert."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.artifacts import TensorReader
from pipeline.errors import StageError
from stages.model import compat
from stages.model.names import listed, refuse_differences

if TYPE_CHECKING:
    from torch import Tensor


class LoadedReader(TensorReader):
    """Tensors of a state dict in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def read(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise StageError(f"no tensor named {name}")
        return self._tensors[name]

    def close(self) -> None:
        self._tensors.clear()


def load_whole(
    folder: Path, gguf: str | None, config: Any, *, trust_remote_code: bool
) -> LoadedReader:
    """Load the model once, on the CPU, and check that its files and its module fit each other.

    GGUF weights come out in fp32 (dequantized), others in the dtype of their files.
    """
    from transformers import AutoModelForCausalLM

    where = str(folder / gguf) if gguf else str(folder)
    try:
        with compat.quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                gguf_file=gguf,
                dtype=torch.float32 if gguf else "auto",
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                weights_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise StageError(f"cannot load {where}: {error}") from error
    refuse_differences(where, model, info["missing_keys"], info["unexpected_keys"])
    if info["mismatched_keys"]:
        names = [str(key[0]) for key in info["mismatched_keys"]]
        raise StageError(
            f"the weights in {where} have other shapes than the model: {listed(names)}"
        )
    return LoadedReader({name: tensor.detach() for name, tensor in model.state_dict().items()})


def require_gguf() -> None:
    """Raise StageError when the package that reads GGUF files is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise StageError(
            "reading a GGUF file needs the package `gguf`", hint="pip install 'pipetrain[gguf]'"
        )
