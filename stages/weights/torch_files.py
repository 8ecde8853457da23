"""Files of `torch.save` that hold nothing but tensors (`pytorch_model.bin`)."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.checkpoint.safetensors_format import CHUNK
from pipeline.contracts.tensors import TensorReader, TensorSpec
from pipeline.errors import StageError
from stages.formats.files import explained
from stages.formats.mapped import flattened

if TYPE_CHECKING:
    from torch import Tensor


class MemoryReader(TensorReader):
    """Tensors of a state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        tensor = self._tensor(name)
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        yield from pieces(self._tensor(name), start, stop)

    def close(self) -> None:
        self._tensors.clear()

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise StageError(f"no tensor named {name}")
        return self._tensors[name].detach()


def pieces(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Elements [start, stop) of a tensor, flattened, in pieces of a few MiB."""
    whole = tensor.contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # one element can have any stride
    step = max(CHUNK // tensor.element_size(), 1)
    for first in range(start, stop, step):
        yield flat[first : min(first + step, stop)]


class TorchFilesReader(MemoryReader):
    """Their tensors, mapped: only what is asked for is read. No code in a file is ever run.

    Raises StageError for a file that is damaged or holds more than tensors.
    """

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
            self.bytes_read += piece.numel() * piece.element_size()
            yield piece


def _content(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        # Files of torch before 1.6 are no archives and cannot be mapped.
        mapped = zipfile.is_zipfile(file)
        content: Any = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
    except Exception as error:
        raise explained(error, str(file)) from error
    if not isinstance(content, dict):
        raise StageError(f"{file}: holds no state dict")
    for name, tensor in content.items():
        if isinstance(name, str) and isinstance(tensor, torch.Tensor):
            try:
                _require_plain(tensor)
                flattened(tensor)
            except ValueError as error:
                raise StageError(f"{file}: {name}: {error}") from error
            yield name, tensor
        elif name != "_metadata":
            raise StageError(f"{file}: {name!r} is no tensor")


def _require_plain(tensor: Tensor) -> None:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError("sparse, quantized or without values, which cannot be trained")
