"""Tensors in memory, and in files of `torch.save` (`pytorch_model.bin`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pipeline import StageError, TensorReader, TensorSpec
from pipeline.checkpoint import CHUNK
from stages.formats.stored import flattened, load

T = TypeVar("T")


def named(table: Mapping[str, T], name: str) -> T:
    """The entry of a tensor. Raises StageError if there is none."""
    if name not in table:
        raise StageError(f"no tensor named {name}")
    return table[name]


def pieces(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Elements [start, stop) of a tensor, flattened, in pieces of a few MiB."""
    whole = tensor.contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # one element can have any stride
    step = max(CHUNK // tensor.element_size(), 1)
    for first in range(start, stop, step):
        yield flat[first : min(first + step, stop)]


class MemoryReader(TensorReader):
    """Tensors of a state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        tensor = named(self._tensors, name)
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        yield from pieces(named(self._tensors, name).detach(), start, stop)

    def close(self) -> None:
        self._tensors.clear()


class TorchFilesReader(MemoryReader):
    """Tensors of files of `torch.save`, mapped: a range costs its own bytes. No code in a file is
    ever run. Raises StageError for a file that is damaged or holds more than tensors."""

    as_stored = True

    def __init__(self, files: Iterable[Path]) -> None:
        tensors: dict[str, Tensor] = {}
        for file in files:
            for name, tensor in _content(file):
                if name in tensors:
                    raise StageError(f"{file}: holds {name}, which another file holds too")
                tensors[name] = tensor
        super().__init__(tensors)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        for piece in super().chunks(name, start, stop):
            self.bytes_read += piece.nbytes
            yield piece


def _content(file: Path) -> Iterator[tuple[str, Tensor]]:
    content = load(file, verify=False)
    if not isinstance(content, dict):
        raise StageError(f"{file}: holds no state dict")
    for name, tensor in content.items():
        if isinstance(name, str) and isinstance(tensor, torch.Tensor):
            if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
                raise StageError(
                    f"{file}: {name}: sparse, quantized or without values, which cannot be trained"
                )
            try:
                flattened(tensor)
            except ValueError as error:
                raise StageError(f"{file}: {name}: {error}") from error
            yield name, tensor
        elif name != "_metadata":
            raise StageError(f"{file}: {name!r} is not a tensor")
