"""Formats in which training states are kept on disk: what each can do, and which are installed.

A format is a class under the entry-point group `pipe.formats`. Importing its module imports no
torch; what is heavy is imported when a folder is opened or written.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pipeline.errors import PluginError, UsageError
from pipeline.plan.registry import Entry, installed_entries
from pipeline.utils.text import closest

if TYPE_CHECKING:
    from pipeline.checkpoint.state_source import StateSource

GROUP = "pipe.formats"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a person says of a state that the state itself may not know."""

    samples: int = 0
    """Samples trained on, where the format does not keep it."""

    weights_only: bool = False
    """Nothing but weights is wanted, so the optimizer's state may be missing."""

    verify: bool = True
    """Compare checksums that are of whole files; one process of several is enough."""


class StateFormat(ABC):
    """One layout of files. Methods raise CheckpointError, naming the file at fault."""

    name: ClassVar[str]
    writes: ClassVar[bool] = True

    @abstractmethod
    def detect(self, folder: Path) -> bool:
        """Whether the folder looks like this format; reads names and small files only."""

    @abstractmethod
    def open(self, folder: Path, reading: Reading) -> StateSource:
        """The state in the folder, to be read range by range."""

    def target(self, folder: Path, step: int) -> Path:
        """Where `write` puts the state after `step` steps, when told `folder`. Raises UsageError
        for a folder that cannot hold it."""
        return folder

    def write(self, source: StateSource, folder: Path) -> Sequence[str]:
        """Write the state as the folder `target`, which does not exist; it appears whole or not at
        all. Returns what its reader should know."""
        raise UsageError(f"{self.name} can be read, but not written")


def open_state(address: str, reading: Reading) -> StateSource:
    """The state at a path, in whatever format it is, or at an address, where only canonical ones
    are. Raises CheckpointError, and UsageError for a folder of no known format."""
    if "://" in address:
        from pipeline.checkpoint.reader import CheckpointReader
        from pipeline.checkpoint.store import locate

        return CheckpointReader(*locate(address))
    folder = Path(address)
    return Formats.installed().detect(folder).open(folder, reading)


class Formats:
    """Installed formats by name."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[str, Entry] = {}
        for entry in entries:
            other = self._entries.setdefault(entry.name, entry)
            # an editable install beside a normal one lists its entry points twice
            if other.distribution != entry.distribution:
                raise PluginError(
                    f"format `{entry.name}` is registered by {other} and {entry}",
                    hint="uninstall one of them",
                )

    @classmethod
    def installed(cls) -> Formats:
        """What the installed packages register under `pipe.formats`."""
        return cls(installed_entries(GROUP))

    def names(self) -> list[str]:
        """All of them, in alphabetical order."""
        return sorted(self._entries)

    def load(self, name: str) -> StateFormat:
        """The format called `name`. Raises UsageError when there is none, PluginError when it
        cannot be loaded."""
        if name not in self._entries:
            similar = closest(name, self._entries)
            hint = f"did you mean `{similar}`?" if similar else f"there are {_list(self.names())}"
            raise UsageError(f"there is no format `{name}`", hint=hint)
        entry = self._entries[name]
        try:
            kind = importlib.metadata.EntryPoint(entry.name, entry.value, GROUP).load()
        except Exception as error:
            raise PluginError(
                f"format `{name}` of {entry} cannot be loaded: {type(error).__name__}: {error}",
                hint=f"repair or uninstall {entry.distribution}",
            ) from error
        if not (isinstance(kind, type) and issubclass(kind, StateFormat)):
            raise PluginError(f"format `{name}` of {entry} ({entry.value}) is no StateFormat")
        return kind()

    def detect(self, folder: Path) -> StateFormat:
        """The one format that `folder` has. Raises UsageError for none and for several."""
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder")
        found = [form for form in map(self.load, self.names()) if form.detect(folder)]
        if len(found) == 1:
            return found[0]
        if found:
            matching = _list([form.name for form in found])
            raise UsageError(f"{folder}: could be {matching}", hint="say which with --from")
        raise UsageError(
            f"{folder}: no checkpoint of a known format ({_list(self.names())})",
            hint="give the folder of one checkpoint, as in checkpoints/step-00000020",
        )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
