"""A row's way to a sample: read, encoded, cut to length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from stages.data.encoding import Dropped, Encoded
from stages.data.forms import FormName, Reader
from stages.data.items import Item
from stages.data.rows import Row

TooLong = Literal["truncate", "drop", "error"]


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Makes the tokens of rows; a pure function of each row."""

    reader: Reader
    encode: Callable[[Item], Encoded | Dropped]
    sequence_length: int
    too_long: TooLong

    def batch(self, rows: Sequence[tuple[FormName, Row]]) -> list[Encoded | Dropped]:
        """The rows' tokens in order. Raises DataError for a row that cannot be used."""
        return [self.one(form, row) for form, row in rows]

    def one(self, form: FormName, row: Row) -> Encoded | Dropped:
        """One row's tokens, at most `sequence_length` + 1; Dropped when none is trained on."""
        encoded = self.encode(self.reader.item(form, row))
        return encoded if isinstance(encoded, Dropped) else self._fit(row, encoded)

    def _fit(self, row: Row, encoded: Encoded) -> Encoded | Dropped:
        room = self.sequence_length + 1
        if not encoded.trained[1:].any():  # nothing predicts the first token
            return Dropped(why="without a token to train on")
        if len(encoded.ids) <= room:
            return encoded
        if self.too_long == "error":
            tokens = len(encoded.ids) - 1
            raise row.error(f"{tokens} tokens, but `sequence_length` is {self.sequence_length}")
        if self.too_long == "drop":
            return Dropped(why="longer than `sequence_length`", long=True)
        if not encoded.trained[1:room].any():
            return Dropped(why="whose trained tokens lie behind `sequence_length`", long=True)
        return Encoded(ids=encoded.ids[:room], trained=encoded.trained[:room], long=True)
