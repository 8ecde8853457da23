"""Rows that cannot be trained on: collected, counted by kind, and reported or left out together.
Notes on what was left out or changed of a source, which are kept with its tokens."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pipeline import BadRows, DataError
from pipeline.utils import counted
from stages.data.sources import Part

NOTES = "notes.json"
"""File of an entry with its notes, if there are any."""
SHOWN = 20
"""Rows that an error shows."""
MOST = 1000
"""Rows after which reading ends, where they are errors anyway."""
_LINE = 400
"""Characters of a row's mistake that are shown."""
_VARIES = re.compile(
    r"""(?<!\w)(['"])(?:\\.|(?!\1).)*\1(?!\w)|(?<=\[)\d+(?=\])|\b\d[\d,.]*\b""", re.DOTALL
)
"""Parts that differ between mistakes of one kind: quoted values, indices and numbers."""


@dataclass(frozen=True)
class Note:
    """A change to some rows of a source. `part` is the index of the source's part with the first of
    these rows (the same content may have another name in a later run), `row` its number in that
    part, from 1, or 0 for the whole, `place` the place in that row, if one matters."""

    text: str
    part: int
    row: int
    place: str = ""
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
        text = json.dumps([asdict(note) for note in notes])
        (folder / NOTES).write_text(text, encoding="utf-8")


class Mistake(NamedTuple):
    """A mistake in a row, found by another process."""

    message: str
    hint: str


def kind_of(message: str) -> str:
    """Return a message without what differs between mistakes of one kind."""
    return _VARIES.sub(lambda found: "'…'" if found[1] else "…", message)


class Enough(Exception):
    """No further row needs to be read."""


class Mistakes:
    """The mistakes of a source."""

    def __init__(self, parts: Sequence[Part], treatment: Literal["error", "drop"]) -> None:
        numbered = reversed([*enumerate(parts)])
        self._numbers = {str(part.name): number for number, part in numbered}
        self._treatment = treatment
        self._first: dict[str, DataError] = {}
        """First mistake of each kind."""
        self._varied = set[str]()
        """Kinds whose mistakes differ in their words."""
        self._kinds = Counter[str]()
        self.count = 0
        """Number of rows with a mistake."""
        self._errors: list[DataError] = []
        """The first mistakes that were found, at most MOST."""

    @property
    def enough(self) -> bool:
        """Whether no further row needs to be read."""
        return self._treatment == "error" and self.count >= MOST

    def report(self, error: DataError) -> None:
        """Count the mistake of a row that was read. Raises Enough."""
        self.add(error)
        if self.enough:
            raise Enough

    def add(self, error: DataError) -> None:
        """Count a row's mistake."""
        kind = kind_of(error.message)
        known = self._first.setdefault(kind, error)
        if known.message != error.message:
            self._varied.add(kind)
        if self.place(error.file, error.row) < self.place(known.file, known.row):
            self._first[kind] = error
        self._kinds[kind] += 1
        self.count += 1
        if len(self._errors) < MOST:
            self._errors.append(error)

    def add_file(self, error: DataError) -> None:
        """Count a file that cannot be read; raise where rows are dropped: a file is not a row."""
        if self._treatment == "drop":
            raise error
        self.add(error)

    def place(self, file: str | Path, row: int | None) -> tuple[int, int]:
        """Return the index of the part of a name, and the number of the row, as in a Note."""
        return self._numbers[str(file)], row or 0

    def check(self, rows: int) -> list[Note]:
        """Return notes on the rows that were dropped. Where mistakes are errors, raises the
        DataError of the only one, or BadRows. `rows`: number of rows that were read, including
        those with mistakes."""
        if not self.count:
            return []
        kinds = [*self.kinds()]
        if self._treatment == "drop":
            said = "dropped {} that cannot be trained on: {}"
            return [
                Note(said.format(counted(n, "rows"), words), *self.place(one.file, one.row))
                for words, n, one in kinds
            ]
        first = sorted(self._errors, key=lambda each: self.place(each.file, each.row))[:SHOWN]
        if self.count == 1:
            raise first[0]
        head = f"{self.count:,} of {counted(rows, 'rows')} cannot be trained on"
        if self.enough:
            head += f", and reading ended after these: the first {len(first)}"
        elif self.count > len(first):
            head += f": the first {len(first)}"
        lines = [f"{head}:", *(f"  {_cut(str(error))}" for error in first)]
        if len(kinds) < len(first):
            common = kinds[:SHOWN]
            lines += ["by kind:", *(f"  {counted(n, 'rows')}: {words}" for words, n, _ in common)]
            if rest := self.count - sum(count for _, count, _ in common):
                lines.append(f"  {counted(rest, 'rows')} of other kinds")
        lines.append("`bad_rows: drop` leaves such rows out")
        raise BadRows("\n".join(lines), rows=first, kinds=self._kinds)

    def kinds(self) -> Iterator[tuple[str, int, DataError]]:
        """Yield each kind of mistake in words, its number, and the first; most frequent first."""
        for kind, count in self._kinds.most_common():
            first = self._first[kind]
            yield _cut(kind if kind in self._varied else first.message), count, first


def together(errors: Sequence[DataError | BadRows]) -> DataError | BadRows:
    """Return the errors of several sources as one."""
    if len(errors) == 1:
        return errors[0]
    rows, kinds = list[DataError](), Counter[str]()
    for error in errors:
        rows += error.rows if isinstance(error, BadRows) else [error]
        kinds.update(error.kinds if isinstance(error, BadRows) else [kind_of(error.message)])
    return BadRows("\n".join(map(str, errors)), rows=rows, kinds=kinds)


def _cut(text: str) -> str:
    return text if len(text) <= _LINE else f"{text[:_LINE]}…"
