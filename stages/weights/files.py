"""Tensors of safetensors files and of `torch.save`; and a quick look at both kinds of files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline import StageError, TensorSpec, system_errors_as
from pipeline.checkpoint import CHUNK, DTYPES, as_bytes, table
from pipeline.utils import open_regular, read_at
from stages.formats.stored import flattened, load
from stages.weights.views import ListedReader, MemoryReader, named

LONGEST_HEADER = 100_000_000
"""Bytes of a header at most, a limit of the safetensors format itself."""


class _Place(NamedTuple):
    file: Path
    offset: int
    spec: TensorSpec


class SafetensorsReader(ListedReader):
    """Tensors of all files; any range of one is read straight into its destination. Raises
    StageError for a damaged file, and for a name in two files."""

    as_stored = True

    def __init__(self, files: Iterable[Path]) -> None:
        self._places: dict[str, _Place] = {}
        for file in files:
            for name, place in _places(file).items():
                if name in self._places:
                    raise StageError(f"{name} is in {self._places[name].file} and in {file}")
                self._places[name] = place
        self.specs = {name: place.spec for name, place in self._places.items()}
        self._open: dict[Path, int] = {}
        self._buffer: Tensor | None = None

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        place = named(self._places, name)
        size = place.spec.dtype.itemsize
        step = CHUNK // size
        if self._buffer is None:
            # Copies to a GPU are faster from page-locked memory.
            pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._buffer = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=pinned)
        buffer = self._buffer
        for first in range(start, stop, step):
            count = min(step, stop - first)
            chunk = buffer[: count * size].view(place.spec.dtype)
            self._read(place, first * size, as_bytes(chunk))
            yield chunk

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        place = named(self._places, name)
        if out.dtype != place.spec.dtype or out.device.type != "cpu":
            super().read_into(name, start, out)
        elif out.numel():
            self._read(place, start * out.element_size(), as_bytes(out))

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._buffer = None

    def _read(self, place: _Place, begin: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes of a tensor from `begin` on."""
        if not 0 <= begin <= place.spec.nbytes - len(memory):
            raise StageError(f"{place.file}: a range beyond the end of a tensor was asked for")
        try:
            if place.file not in self._open:
                self._open[place.file] = os.open(place.file, os.O_RDONLY | os.O_CLOEXEC)
            done = read_at(self._open[place.file], place.offset + begin, memory)
        except OSError as error:
            raise StageError(f"{place.file}: cannot be read: {error.strerror}") from error
        if done < len(memory):
            raise StageError(f"{place.file}: has become shorter while it was read")
        self.bytes_read += done


def _places(file: Path) -> dict[str, _Place]:
    """Place of each tensor of a file. Raises StageError unless the file holds all their bytes."""
    try:
        with open_regular(file) as stream:
            head = stream.read(8)
            length = int.from_bytes(head, "little")
            head += stream.read(min(length, LONGEST_HEADER))
            size = os.fstat(stream.fileno()).st_size
        if len(head) != 8 + length:
            raise ValueError("its header is incomplete")
        found, available = {}, size - len(head)
        for name, entry in table(head).items():
            if not isinstance(entry.dtype, str) or entry.dtype not in DTYPES:
                raise ValueError(f"{name} has the dtype {entry.dtype}, which is not known here")
            if not all(isinstance(rows, int) and rows >= 0 for rows in entry.shape):
                raise ValueError(f"{name} has the shape {list(entry.shape)}")
            spec = TensorSpec(tuple(entry.shape), DTYPES[entry.dtype])
            if entry.begin < 0 or entry.end - entry.begin != spec.nbytes:
                raise ValueError(f"{name} lies at bytes {entry.begin} to {entry.end}")
            if entry.end > available:
                raise ValueError(f"the file ends before {name} does: it is incomplete")
            found[name] = _Place(file, len(head) + entry.begin, spec)
        return found
    except (ValueError, OSError) as error:
        raise StageError(f"{file} cannot be read as safetensors: {error}") from error


class TorchFilesReader(MemoryReader):
    """Tensors of files of `torch.save` (`pytorch_model.bin`), mapped: a range costs its own bytes.
    No code in a file is ever run. Raises StageError for a file that is damaged or holds more than
    tensors."""

    as_stored = True

    def __init__(self, files: Iterable[Path]) -> None:
        tensors: dict[str, Tensor] = {}
        for file in files:
            content = load(file, verify=False)
            if not isinstance(content, dict):
                raise StageError(f"{file}: holds no state dict")
            for name, tensor in content.items():
                if name == "_metadata":
                    continue
                if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                    raise StageError(f"{file}: {name!r} is not a tensor")
                if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
                    why = "sparse, quantized or without values, which cannot be trained"
                    raise StageError(f"{file}: {name}: {why}")
                try:
                    flattened(tensor)
                except ValueError as error:
                    raise StageError(f"{file}: {name}: {error}") from error
                if name in tensors:
                    raise StageError(f"{file}: holds {name}, which another file holds too")
                tensors[name] = tensor
        super().__init__(tensors)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        for piece in super().chunks(name, start, stop):
            self.bytes_read += piece.nbytes
            yield piece


PIECE = 4096
"""Bytes of a piece: a page of memory, and of most disks."""
PIECES = 512
"""Pieces of a file at most."""


def sampled(files: Sequence[Path]) -> str:
    """Hex sha256 over each file's name, size, beginning, and pieces: of a safetensors file the
    middle of every tensor, or of 512 evenly chosen ones; of another file 512 at even distances.

    A training changes all of a tensor, so its result differs from what it began with; a change of
    a few rows may be missed. Reads 2 MiB a file, or less. Raises StageError.
    """
    with system_errors_as(StageError), ThreadPoolExecutor(8) as pool:
        found = list(pool.map(_sample, files))
    return hashlib.sha256(b"".join(found)).hexdigest()


def _sample(file: Path) -> bytes:
    size = file.stat().st_size
    offsets = [*range(0, size, max(PIECE, size // PIECES))]
    if file.suffix == ".safetensors":
        each = _places(file).values()
        offsets = sorted(one.offset + max(0, one.spec.nbytes - PIECE) // 2 for one in each)
    count = min(len(offsets), PIECES)
    even = (offsets[number * len(offsets) // count] for number in range(count))
    digest = hashlib.sha256(f"{file.name} {size}\0".encode())
    with file.open("rb", buffering=0) as stream:
        for offset in (0, *even):
            digest.update(os.pread(stream.fileno(), PIECE, offset))
    return digest.digest()
