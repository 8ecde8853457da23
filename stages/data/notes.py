"""Notes on a source: what was left out or changed of its rows, kept with its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stages.data.cache import Entry

_FILE = "notes.json"


@dataclass(frozen=True, kw_only=True)
class Note:
    """A change to some rows of a source."""

    text: str
    part: int
    """Number of the part of the source, from 0, that has the first of these rows: the same content
    may have another name in a later run."""
    row: int
    """Its number in that part, from 1; 0 for the whole."""
    place: str = ""
    """The place in that row, if one matters."""
    hint: str = ""

    def told(self, names: Sequence[object]) -> str:
        """Return the note for people. `names`: of the source's parts."""
        place = f"{names[self.part]}:{self.row}" if self.row else str(names[self.part])
        inside = f", `{self.place}`" if self.place else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.text}, the first: {place}{inside}{hint}"


def write_notes(folder: Path, notes: Sequence[Note]) -> None:
    """Write the notes on a source, if there are any, among the files of its entry."""
    if notes:
        (folder / _FILE).write_text(json.dumps([asdict(note) for note in notes]), encoding="utf-8")


def read_notes(entry: Entry) -> list[Note]:
    """Return the notes in an entry; none where there is nothing to say."""
    if not (entry.folder / _FILE).exists():
        return []
    return [Note(**each) for each in json.loads(entry.array(_FILE, "u1")[:].tobytes())]
