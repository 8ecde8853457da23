"""Formats in which training states are kept on disk: what each can do, which are installed, and how
a state of any becomes a checkpoint.

A format is a class under the entry-point group `pipe.formats`. Importing its module imports no
torch; what is heavy is imported when a folder is opened or written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.chain.registry import Plugins
from pipeline.checkpoint.division import Division, Piece
from pipeline.checkpoint.file_layout import CHUNK, FileLayout, RankFiles
from pipeline.checkpoint.manifest import ManifestTemplate, TensorEntry
from pipeline.checkpoint.store import step_name, step_number
from pipeline.contracts.engine import WEIGHT, EngineState
from pipeline.errors import CheckpointError, UsageError
from pipeline.utils.files import page_aligned, sync, sync_tree

if TYPE_CHECKING:
    from pipeline.checkpoint.location import Store
    from pipeline.checkpoint.writer import FileBytes


class StateSource(ABC):
    """A training state that is read from a checkpoint of any format, in canonical terms."""

    where: str
    """Path or address, for people."""
    step: int
    world_size: int
    writer: Mapping[str, Any]
    """The program that wrote it, for people."""
    progress: Mapping[str, Any]
    """Fields of `pipeline.contracts.training.Progress`."""
    state: EngineState
    """State without `shapes`, which `tensors` have."""
    tensors: Mapping[str, TensorEntry]
    """Tensors by key, `KIND/NAME`."""

    @abstractmethod
    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """The bytes of elements [start, stop) of the flattened tensor, in order: (first element,
        bytes), each valid until the next is taken. Raises CheckpointError."""

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` from element `start` of the flattened tensor on. Raises CheckpointError."""
        done = 0
        for _, data in self.read(key, start, start + len(out) // self.entry(key).itemsize):
            out[done : done + len(data)] = data
            done += len(data)
        if done != len(out):
            raise CheckpointError(f"{self.where}: {key} is incomplete")

    def digest(self) -> str:
        """Hex digest of all tensors by their checksums, with shapes and state; the same wherever it
        lies. Empty in a format without checksums."""
        return ""

    def entry(self, key: str) -> TensorEntry:
        """The tensor's dtype and shape. Raises CheckpointError for an unknown key."""
        if key not in self.tensors:
            raise CheckpointError(f"{self.where}: holds no {key}")
        return self.tensors[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @abstractmethod
    def close(self) -> None:
        """Release files."""


class StateView(StateSource):
    """Another state, or its weights only, without training state. Closing it closes the other.
    `report` is called with the number of bytes each time some were read."""

    def __init__(
        self,
        source: StateSource,
        report: Callable[[int], object] = lambda count: None,
        *,
        weights_only: bool = False,
    ) -> None:
        self._source = source
        self._report = report
        for name in StateSource.__annotations__:
            setattr(self, name, getattr(source, name))
        if weights_only:
            self.tensors = {k: e for k, e in self.tensors.items() if k.startswith(f"{WEIGHT}/")}
            frozen = [*self.state.updates, *self.state.frozen]
            self.state = EngineState(
                aliases=self.state.aliases, frozen=frozen, groups=[], updates={}, loss_scale=None
            )  # fmt: skip

    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        for first, data in self._source.read(key, start, stop):
            yield first, data
            self._report(len(data))

    def close(self) -> None:
        self._source.close()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Facts about a state that a person supplies and it may lack."""

    samples: int = 0
    """Samples trained on, where the format does not keep it."""

    weights_only: bool = False
    """Whether the optimizer's state is not wanted, and may be missing."""

    verify: bool = True
    """Whether to compare checksums of whole files; one process of several is enough."""


class StateFormat(ABC):
    """One layout of files. Methods raise CheckpointError, naming the file at fault."""

    name: ClassVar[str]

    @abstractmethod
    def detect(self, folder: Path) -> bool:
        """Whether the folder looks like this format; reads names and small files only."""

    @abstractmethod
    def open(self, folder: Path, reading: Reading) -> StateSource:
        """The state in the folder, to be read range by range."""

    def target(self, folder: Path, step: int) -> Path:
        """The folder for `write`, given a person's. Raises UsageError if it cannot be used."""
        return folder

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        """Write the state as the folder `target`, which does not exist; it appears whole or not at
        all. Returns notes for its reader."""
        raise UsageError(f"{self.name} can be read, but not written")


class Formats(Plugins[type[StateFormat]]):
    """Installed formats by name."""

    group = "pipe.formats"
    noun = "format"

    def fault(self, loaded: Any) -> str:
        """The first thing that an object lacks to be a format."""
        is_format = isinstance(loaded, type) and issubclass(loaded, StateFormat)
        return "" if is_format else "is not a StateFormat"

    def get(self, name: str) -> StateFormat:
        """The format called `name`. Raises UsageError if unknown, PluginError if broken."""
        if name not in self:
            hint = f"there are {', '.join(self.names())}"
            raise UsageError(f"there is no format `{name}`", hint=hint)
        return self.load(name)()

    def detect(self, folder: Path) -> StateFormat:
        """The one format that `folder` has. Raises UsageError for none and for several."""
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder")
        found = [form for form in map(self.get, self.names()) if form.detect(folder)]
        if len(found) > 1:
            matching = ", ".join(form.name for form in found)
            raise UsageError(f"{folder}: could be {matching}", hint="say which with --from")
        if not found:
            raise UsageError(
                f"{folder}: no checkpoint of a known format ({', '.join(self.names())})",
                hint="give the folder of one checkpoint, as in checkpoints/step-00000020",
            )
        return found[0]


def step_target(folder: Path, step: int) -> Path:
    """A folder `step-N` itself, any other with `step-N` in it. Raises UsageError for another N."""
    number = step_number(folder.name)
    if number is None:
        return folder / step_name(step)
    if number != step:
        raise UsageError(
            f"{folder}: the state is of step {step}",
            hint=f"call the folder {step_name(step)}, or give the folder to put that in",
        )
    return folder


def write_checkpoint(source: StateSource, store: Store, name: str, file_layout: FileLayout) -> None:
    """Commit `source` as the checkpoint `name`, with checksums, in memory for one chunk. Raises
    OSError, and whatever reading `source` raises."""
    from pipeline.checkpoint.writer import write_files

    entries = file_layout.in_order(entry for entry in source.tensors.values() if entry.numel)
    division = Division.of([Piece(0, 0, entry.numel)] for entry in entries)
    own = file_layout.lay_out(0, division.of_rank(0), entries)
    template = ManifestTemplate(
        world_size=source.world_size, writer=source.writer, tensors=entries, division=division,
        files=own.described,
    )  # fmt: skip
    facts = {"step": source.step, "progress": source.progress, "state": source.state}
    transaction = store.begin(name, uuid.uuid4().hex[:12])
    try:
        digest = write_files(own, _stream(source, own), store, transaction)
        store.commit(transaction, template.fill(facts, transaction.prefix, [digest]).dump())
    except BaseException:
        store.abandon(transaction)
        raise


def _stream(source: StateSource, own: RankFiles) -> Iterator[FileBytes]:
    """All bytes of the files, each part valid until the next is taken."""
    for item in own.items:
        if not item.key:
            yield item.file, item.place, 0, memoryview(item.head), False
            continue
        size, buffer = item.place.numel, page_aligned(min(CHUNK, item.place.numel))
        for begin in range(0, size, CHUNK):  # whole blocks, but for the last
            data = buffer[: size - begin]
            source.read_into(item.key, begin // source.entry(item.key).itemsize, data)
            yield item.file, item.place, begin, data, True


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to write into. It appears as `folder` when the body ends, durably, or not at all."""
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_tree(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(folder.parent)
