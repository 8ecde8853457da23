"""A GGUF file's tensors, dequantized while they are read, a range of rows at a time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline import StageError, TensorReader, TensorSpec
from pipeline.checkpoint import CHUNK
from pipeline.utils import optional
from stages.model import compat
from stages.model.read import gguf_header
from stages.weights.change import Change, renamed
from stages.weights.converted import ConvertedReader
from stages.weights.torch_files import named

if TYPE_CHECKING:
    from torch import Tensor, nn

FLOATS = ("F16", "F32", "F64", "BF16")
"""Names of types that are not quantized."""


def gguf_reader(file: Path) -> Any:
    """Return the gguf package's reader of a file, without the arrays of its metadata. Raises
    StageError where the package is not installed, and for a file that is no GGUF or is cut
    short."""
    with gguf_package():
        from stages.model.gguf_compat import TensorsOnly
    gguf_header(file)  # the package walks through whatever a damaged header claims
    try:
        return TensorsOnly(file)
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        hint = "download or copy it again"
        raise StageError(f"{file} cannot be read as GGUF: {error}", hint=hint) from error


def quantization(file: Path) -> str:
    """Return the name of the type that most of a file's weights are quantized to, such as Q4_1;
    empty where most are floating-point numbers. Raises what `gguf_reader` does."""
    sizes = Counter[str]()
    for tensor in gguf_reader(file).tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    kind = max(sizes, key=lambda name: sizes[name], default="")
    return "" if kind in FLOATS else kind


def gguf_package() -> AbstractContextManager[None]:
    """Raise StageError where the body imports the package and it is not installed."""
    hint = "pip install 'pipetrain[gguf]'"
    return optional("reading a GGUF file needs the package `gguf`", hint=hint)


def quick_gguf(file: str | None) -> AbstractContextManager[None]:
    """Have transformers read a GGUF file, if it is one, quickly in the body."""
    if file is None:
        return contextlib.nullcontext()
    with gguf_package():
        from stages.model.gguf_compat import read_quickly
    return read_quickly()


def open_gguf(file: Path, model: nn.Module) -> ConvertedReader:
    """The file's tensors in fp32 under the names of `model`, unknown ones under their own. Raises
    StageError for an architecture that it does not know."""
    tensors = GgufTensors(file)
    try:
        processor, names = compat.gguf_names(tensors.architecture, model)
    except (ValueError, KeyError, NotImplementedError, IndexError) as error:
        raise StageError(f"{file} cannot be read: {error}") from error
    groups, unknown = dict[str, list[str]](), list[Change]()
    for name in tensors.names():
        target = names.get(name) or names.get(name.removesuffix(".weight"))
        if target is None:
            unknown.append(renamed(name, name))
        else:
            groups.setdefault(target, []).append(name)
    changes = [*unknown, *(_change(sources, processor, names) for sources in groups.values())]
    return ConvertedReader(tensors, changes)


class GgufTensors(TensorReader):
    """A file's tensors under their own names, in fp32."""

    def __init__(self, file: Path) -> None:
        reader = gguf_reader(file)
        architecture = reader.get_field("general.architecture")
        try:
            self.architecture = "" if architecture is None else str(architecture.contents())
        except UnicodeDecodeError as error:
            raise StageError(f"{file} names no architecture: {error}") from error
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        shape = tuple(int(size) for size in reversed(named(self._tensors, name).shape))
        return TensorSpec(shape, torch.float32)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        width = self.spec(name).shape[-1]
        stored = self._tensors[name]
        data = stored.data.reshape(-1, stored.data.shape[-1])
        step = max(CHUNK // (4 * width), 1)
        while start < stop:
            row = start // width
            last = min(row + step, -(-stop // width))
            flat = self._dequantized(data[row:last], stored.tensor_type)
            end = min(last * width, stop)
            yield flat[start - row * width : end - row * width]
            start = end

    def close(self) -> None:
        self._tensors.clear()

    def _dequantized(self, rows: Any, kind: Any) -> Tensor:
        from gguf import dequantize

        self.bytes_read += rows.nbytes
        try:
            values = dequantize(rows, kind).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise StageError(str(error), hint="use a file with another quantization") from error
        return torch.from_numpy(np.require(values, requirements=["C", "W"])).view(-1)


def _change(sources: Sequence[str], processor: Any, names: Mapping[str, str]) -> Change:
    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parsed: dict[str, dict[str, Tensor]] = {"tensors": {}}
        made: dict[str, Tensor] = {}
        for name in sources:
            result = processor.process(
                weights=_array(tensors[name]),
                name=name,
                tensor_key_mapping=names,
                parsed_parameters=parsed,
            )
            if result.name is not None:
                made[names[result.name]] = _tensor(result.weights, like=tensors[name])
        outline = any(tensor.is_meta for tensor in tensors.values())
        rest = parsed["tensors"].items()
        return made | {name: one.to("meta") if outline else one for name, one in rest}

    return Change(sources=sources, convert=convert)


def _array(tensor: Tensor) -> Any:
    """A numpy array of the tensor, without memory if the tensor has none."""
    if tensor.is_meta:
        return np.broadcast_to(np.zeros((), np.float32), tuple(tensor.shape))
    return tensor.numpy()


def _tensor(array: Any, *, like: Tensor) -> Tensor:
    if like.is_meta:
        return torch.empty(array.shape, dtype=like.dtype, device="meta")
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
