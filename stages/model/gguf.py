"""A GGUF file's tensors, dequantized while they are read, a range of rows at a time."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline import StageError, TensorSpec
from pipeline.checkpoint import CHUNK
from pipeline.utils import optional
from stages.model import compat
from stages.model.files import gguf_header, unreadable
from stages.weights.converted import Change, ConvertedReader, renamed
from stages.weights.views import ListedReader, named

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("F16", "F32", "F64", "BF16")
"""Names of types that are not quantized."""
NEEDED, HINT = "reading a GGUF file needs the package `gguf`", "pip install 'pipetrain[gguf]'"


def quantization(file: Path) -> str:
    """Return the name of the type that most of a file's weights are quantized to, such as Q4_1;
    empty where most are floating-point numbers. Raises what `GgufTensors` does."""
    sizes = Counter[str]()
    tensors = GgufTensors(file)
    for name, (_, kind) in tensors.stored.items():
        sizes[kind.name] += tensors.spec(name).numel
    most = max(sizes, key=lambda name: sizes[name], default="")
    return "" if most in FLOATS else most


def open_gguf(file: Path, model: Any) -> ConvertedReader:
    """Return the file's tensors in fp32 under the names of `model`, unknown ones under their own.
    Raises StageError for an architecture that it does not know."""
    tensors = GgufTensors(file)
    import gguf
    from transformers import modeling_gguf_pytorch_utils as mapping

    try:
        kind = mapping.TENSOR_PROCESSORS.get(tensors.architecture, mapping.TensorProcessor)
        processor = kind(config=model.config.to_dict())
        # transformers asks for the same names once for every module, and making them takes 0.1 s
        once = functools.cache(gguf.get_tensor_name_map)
        with compat.replaced(gguf, "get_tensor_name_map", once):
            names = mapping.get_gguf_hf_weights_map(model, processor)
    except (ValueError, KeyError, NotImplementedError, IndexError) as error:
        raise StageError(f"{file} cannot be read: {error}") from error
    groups, unknown = dict[str, list[str]](), list[Change]()
    for name in tensors.names():
        target = names.get(name) or names.get(name.removesuffix(".weight"))
        if target is None:
            unknown.append(renamed(name, name))
        else:
            groups.setdefault(target, []).append(name)
    convert = functools.partial(_converted, processor, names)
    changes = [*unknown, *(Change(sources=one, convert=convert) for one in groups.values())]
    return ConvertedReader(tensors, changes)


class GgufTensors(ListedReader):
    """A file's tensors under their own names, in fp32. Raises StageError where the package is not
    installed, and for a file that is not GGUF or is cut short."""

    def __init__(self, file: Path) -> None:
        with optional(NEEDED, hint=HINT):
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        header = gguf_header(file)
        self.architecture = str(header.metadata.get("general.architecture", ""))
        content = np.memmap(file, mode="r")[header.size :]
        self.specs = {}
        self.stored: dict[str, tuple[Any, Any]] = {}
        """Name -> rows as they are stored, and their type."""
        for name, tensor in header.tensors.items():
            try:
                kind, width = GGMLQuantizationType(tensor.kind), tensor.shape[0]
                block, size = GGML_QUANT_SIZES[kind]
                if width % block:
                    raise ValueError(f"rows of {width} are not whole blocks of {kind.name}")
                rows, row = math.prod(tensor.shape[1:]), width // block * size
                if tensor.offset + rows * row > len(content):
                    raise ValueError("the file ends before it does")
            except ValueError as error:
                raise unreadable(file, ValueError(f"{name}: {error}")) from error
            found = content[tensor.offset : tensor.offset + rows * row].reshape(rows, row)
            self.stored[name] = found, kind
            self.specs[name] = TensorSpec(tensor.shape[::-1], torch.float32)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        from gguf import dequantize

        (data, kind), width = named(self.stored, name), self.specs[name].shape[-1]
        step = max(CHUNK // (4 * width), 1)
        while start < stop:
            row = start // width
            last = min(row + step, -(-stop // width))
            self.bytes_read += data[row:last].nbytes
            try:
                values = dequantize(data[row:last], kind).astype(np.float32, copy=False)
            except NotImplementedError as error:
                raise StageError(str(error), hint="use a file with another quantization") from error
            flat = torch.from_numpy(np.require(values, requirements=["C", "W"])).view(-1)
            end = min(last * width, stop)
            yield flat[start - row * width : end - row * width]
            start = end

    def close(self) -> None:
        self.stored.clear()
        self.specs.clear()


def _converted(
    processor: Any, names: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Results of transformers' `processor` of arrays, by their `names` in the module."""
    parsed: dict[str, dict[str, Tensor]] = {"tensors": {}}
    made: dict[str, Tensor] = {}
    outline = any(tensor.is_meta for tensor in tensors.values())
    for name, tensor in tensors.items():
        # Without values, an array without memory stands for it.
        empty = np.broadcast_to(np.zeros((), np.float32), tuple(tensor.shape))
        result = processor.process(
            weights=empty if outline else tensor.numpy(),
            name=name,
            tensor_key_mapping=names,
            parsed_parameters=parsed,
        )
        if result.name is None:
            continue
        made[names[result.name]] = (
            torch.empty(result.weights.shape, dtype=tensor.dtype, device="meta")
            if outline
            else torch.from_numpy(np.require(result.weights, requirements=["C", "W"]))
        )
    rest = parsed["tensors"].items()
    return made | {name: one.to("meta") if outline else one for name, one in rest}


def quick_gguf() -> AbstractContextManager[None]:
    """Have transformers read a GGUF file quickly in the body: the package's reader makes two views
    of a memory map for each token of the vocabulary, which takes seconds."""
    with optional(NEEDED, hint=HINT):
        import gguf

    class QuickReader(gguf.GGUFReader):  # type: ignore[misc]
        """Reader whose views are plain arrays, which cost a tenth of a memory map's."""

        def _get(
            self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None
        ) -> np.ndarray[Any, Any]:
            order = override_order or self.byte_order
            kind = np.dtype(dtype)
            kind = kind if order == "I" else kind.newbyteorder(order)
            # As from a slice, fewer of them where the file ends.
            there = max(min(int(count), (self.data.size - offset) // kind.itemsize), 0)
            return np.frombuffer(self.data, kind, there, offset if there else 0)

    return compat.replaced(gguf, "GGUFReader", QuickReader)
