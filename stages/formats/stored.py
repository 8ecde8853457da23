"""States in foreign files: `torch.save` read without running code, tensors mapped chunk by chunk.

A pickle can call any function when it is read. torch's restricted unpickler admits tensors and
plain containers; further classes are admitted one by one, as inert stand-ins.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from pipeline import WEIGHT, CheckpointError, EngineState, ParameterGroup
from pipeline.checkpoint import CHUNK, CODES, DTYPES, StateSource, TensorEntry, as_bytes
from pipeline.utils import parse_json, read_whole, require_regular, require_trust

PROGRESS = "progress.json"
"""Name of the file with the progress of a pipetrain run, in a checkpoint of a foreign format."""

_NAME = re.compile(r"(?!\.)[\w.-]{1,200}", re.ASCII)


def load(file: Path, admitted: Sequence[tuple[type, str]] = (), *, verify: bool = True) -> Any:
    """Content of a file of `torch.save`, with its tensors mapped; `admitted` lists stand-ins with
    the full names of their classes. `verify` compares all checksums, which reads the whole file.
    Raises CheckpointError for a damaged file, and for one that needs any other class; UsageError
    where pickles are not trusted."""
    require_trust(file)
    try:
        require_regular(file)
        if verify:
            with zipfile.ZipFile(file) as archive:
                require_checksums(archive)
        with torch.serialization.safe_globals(list(admitted)):
            # Files of torch before 1.6 are no archives and cannot be mapped.
            mapped = zipfile.is_zipfile(file)
            return torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
    except Exception as error:
        raise explained(error, str(file)) from error


def require_checksums(archive: zipfile.ZipFile) -> None:
    """Compare the checksums that `torch.save` stored, as a stream. Raises ValueError."""
    damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"damaged: the checksum of {damaged} in it is wrong")


def explained(error: Exception, where: str) -> CheckpointError:
    """The meaning of a restricted unpickler's error: a refused class, or a damaged file."""
    text = str(error) or type(error).__name__
    refused = re.search(r"GLOBAL ([\w.]+)", text)
    if not isinstance(error, pickle.UnpicklingError) or not (refused or "Weights only" in text):
        return CheckpointError(f"{where}: cannot be read: {text.splitlines()[0]}")
    name = refused.group(1) if refused else "more than tensors and plain values"
    return CheckpointError(
        f"{where}: refused: it holds {name}, and reading that could run code",
        hint="save it again without that, with the tool that wrote it",
    )


@contextlib.contextmanager
def understood(place: Path | str, writer: str) -> Iterator[None]:
    """Raise CheckpointError where the content of `place` has an unexpected structure."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{place}: not as {writer} writes it in the versions that are known here: "
            f"{type(error).__name__}: {error}"
        ) from error


def append(value: Any, stream: IO[bytes]) -> None:
    """Write `value` at the stream's position with `torch.save`. Raises OSError."""
    try:
        torch.save(value, stream)
    except RuntimeError as error:
        # torch replaces the file system's error by a complaint about the number of bytes.
        cause = error.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, stream.name) from None
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError when it is missing or damaged."""
    try:
        value = parse_json(read_whole(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def require_file_name(name: str, where: str) -> str:
    """Return `name`. Raises CheckpointError if as a path it could lead elsewhere."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{where}: {name!r} cannot be the name of a file or a folder")
    return name


Shape = tuple[int, ...]


class Box(NamedTuple):
    """Elements [offset, offset + size) of every dimension."""

    offsets: Shape
    sizes: Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """A tensor that lies in files as chunks, each a box of it. The boxes divide `grid`: the
    tensor's shape, or its number of elements. `load(number)` returns a chunk's bytes, of shape
    (*sizes of the box, bytes of an element)."""

    shape: Shape
    dtype: torch.dtype
    grid: Shape
    boxes: Sequence[Box]
    load: Callable[[int], Tensor]

    def read(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Number of the first element and bytes of each part of elements [start, stop) of the
        flattened tensor. A part has at most CHUNK bytes, unless a row of the grid has more."""
        if start >= stop:
            return
        row, itemsize = math.prod(self.grid[1:]), self.dtype.itemsize
        rows, end = max(CHUNK // (row * itemsize), 1), -(-stop // row)
        for first in range(start // row, end, rows):
            last = min(first + rows, end)
            # Loading verifies the size of each chunk before memory is allocated for the band.
            parts = [
                (box, above, below, self.load(number)[above - origin : below - origin])
                for number, box in enumerate(self.boxes)
                if (above := max(first, origin := box.offsets[0]))
                < (below := min(last, origin + box.sizes[0]))
            ]
            # Rows of the grid without gaps, copied only if several chunks have them.
            if len(parts) == 1:
                band = parts[0][-1].contiguous()
            else:
                shape = (last - first, *self.grid[1:], itemsize)
                band = torch.empty(shape, dtype=torch.uint8)
                for box, above, below, memory in parts:
                    others = zip(box.offsets[1:], box.sizes[1:], strict=True)
                    places = (slice(at, at + size) for at, size in others)
                    band[(slice(above - first, below - first), *places)] = memory
            low, high = max(start, first * row), min(stop, last * row)
            content = as_bytes(band.view(-1))
            yield low, content[(low - first * row) * itemsize : (high - first * row) * itemsize]


def flattened(tensor: Tensor) -> Tensor:
    """All elements in row-major order. Raises ValueError for more elements than are stored."""
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError("a tensor is larger than what is stored of it")
    contiguous = tensor.detach().contiguous()
    return contiguous.as_strided((tensor.numel(),), (1,))  # one element can have any stride


def joined(shape: Sequence[int], parts: Sequence[Tensor]) -> Stored:
    """A tensor of this shape whose elements are those in `parts`, in order. Raises ValueError if
    these are not as many, or of several dtypes."""
    flats = [flattened(part) for part in parts if part.numel()]
    (kind,) = {part.dtype for part in parts}
    numel, (*starts, found) = math.prod(shape), itertools.accumulate(map(len, flats), initial=0)
    if found != numel:
        raise ValueError(f"a tensor of {numel} elements is stored as {found}")
    return Stored(
        shape=tuple(shape),
        dtype=kind,
        grid=(numel,),
        boxes=[Box((start,), (len(flat),)) for start, flat in zip(starts, flats, strict=True)],
        load=lambda number: flats[number].view(torch.uint8).view(-1, kind.itemsize),
    )


def whole(tensor: Tensor) -> Stored:
    """A tensor that is stored in one piece."""
    return joined(tensor.shape, [tensor])


@dataclass(kw_only=True, eq=False)
class MappedSource(StateSource):
    """A state with the tensors `stored`. Raises CheckpointError for a dtype that is not known."""

    where: str
    step: int
    world_size: int
    writer: Mapping[str, Any]
    progress: Mapping[str, Any]
    state: EngineState
    stored: Mapping[str, Stored]

    def __post_init__(self) -> None:
        for key, tensor in self.stored.items():
            if tensor.dtype not in CODES:
                raise CheckpointError(f"{self.where}: {key}: {tensor.dtype} is not converted")
        self.tensors = {
            key: TensorEntry(key=key, dtype=CODES[tensor.dtype], shape=tensor.shape)
            for key, tensor in self.stored.items()
        }

    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        self.entry(key)
        yield from self.stored[key].read(start, stop)

    def close(self) -> None:
        self.stored = {}


def weights_of(source: StateSource) -> dict[str, TensorEntry]:
    """Parameters and buffers by name."""
    prefix = f"{WEIGHT}/"
    return {k.removeprefix(prefix): e for k, e in source.tensors.items() if k.startswith(prefix)}


def assembled(source: StateSource, key: str) -> Tensor:
    """The tensor `key` in memory, with its shape."""
    entry = source.entry(key)
    flat = torch.empty(entry.numel, dtype=DTYPES[entry.dtype])
    source.read_into(key, 0, as_bytes(flat))
    return flat.view(entry.shape)


MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS = ("lr", "betas", "eps", "weight_decay")
"""Hyperparameters that determine what AdamW computes; its others determine how."""


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """AdamW's hyperparameters of a saved group, as JSON has them. The learning rate is the base
    rate, or the last step's if a schedule left no base rate in the group."""
    found = {key: _plain(group[key]) for key in SETTINGS if key in group}
    if group.get("initial_lr") is not None:
        found["lr"] = _plain(group["initial_lr"])
    return found


def group(
    saved: Mapping[str, Any], parameters: Sequence[str], moments: Sequence[str] = MOMENTS
) -> ParameterGroup:
    """A saved group with AdamW's hyperparameters."""
    return ParameterGroup(settings=settings(saved), parameters=parameters, moments=list(moments))


def require_adam(source: StateSource, what: str) -> None:
    """Raise CheckpointError, which says `what` is possible, unless every trained parameter has
    exactly Adam's moments."""
    kept, trained = source.state.moments(), source.state.updates
    if not trained or any(set(kept.get(name, ())) != set(MOMENTS) for name in trained):
        here = ", ".join(source.state.kinds()) or "no optimizer state"
        raise CheckpointError(f"{source.where}: {what}; here is {here}")


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) else value


def require_moments(kinds: Collection[str], where: str, name: str) -> None:
    """Raise CheckpointError unless a parameter has exactly Adam's moments."""
    if not kinds:
        raise CheckpointError(
            f"{where}: holds no optimizer state of {name}",
            hint="it was saved before the first update, or by DeepSpeed with an offload ratio "
            "below 1; --weights-only takes only the weights",
        )
    if set(kinds) != set(MOMENTS):
        raise CheckpointError(
            f"{where}: the optimizer kept {', '.join(sorted(kinds))} for {name}; only Adam's "
            f"{' and '.join(MOMENTS)} can be converted",
            hint="--weights-only takes only the weights",
        )
