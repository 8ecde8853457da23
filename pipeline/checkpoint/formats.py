"""Formats in which training states are kept on disk: what each can do, and which are installed.

A format is a class under the entry-point group `pipe.formats`. Importing its module imports no
torch; what is heavy is imported when a folder is opened or written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipeline.chain.registry import Plugins
from pipeline.checkpoint.manifest import TensorEntry
from pipeline.contracts.engine import WEIGHT, EngineState
from pipeline.errors import CheckpointError, UsageError


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
