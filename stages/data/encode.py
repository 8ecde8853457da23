"""From rows to token ids with the mask of those that are trained on, cut to length."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline import StageError
from stages.data import formats
from stages.data.chat_template import ConversationEncoder
from stages.data.formats import Completion, Example, Format, Tokens
from stages.data.rows import Row
from stages.data.tokenize import TextTokenizer

if TYPE_CHECKING:
    from stages.data.chat import ChatData


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids and, for each, whether it is trained on; shapes (length,), int64 and bool."""

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    long: bool = False
    """Whether the row was longer than a sample and has been truncated."""


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A row that is left out. `why` continues a sentence that begins with "rows"."""

    why: str
    long: bool = False


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Encodes rows by the fields of `data.chat`; a pure function of each row."""

    stage: ChatData
    tokens: TextTokenizer
    vocab_size: int
    """Bound of the ids of pre-tokenised rows."""
    start: list[int]
    """Ids to put before a text; they are not trained on."""

    def batch(self, rows: Sequence[tuple[Format, Row]]) -> list[Encoded | Dropped]:
        """Encode rows in order. Raises DataError for a row that cannot be used."""
        return [self._row(format, row) for format, row in rows]

    def _row(self, format: Format, row: Row) -> Encoded | Dropped:
        stage = self.stage
        example = formats.read(
            row, format, template=stage.template, roles=stage.roles, vocab_size=self.vocab_size
        )
        encoded = self._example(example)
        return encoded if isinstance(encoded, Dropped) else self._truncated(row, encoded)

    def _example(self, example: Example) -> Encoded | Dropped:
        if isinstance(example, Tokens):
            trained = np.array(example.trained, bool)
            return Encoded(ids=np.array(example.ids, np.int64), trained=trained)
        if self.stage.special_tokens != "allow":
            spelled = self.tokens.spelled_in(example.texts())
            if spelled is not None and self.stage.special_tokens == "drop":
                return Dropped(why="whose text spells a special token")
            if spelled is not None:
                raise example.row.error(
                    f"its text spells the special token {spelled!r}",
                    hint="set `special_tokens: drop` to leave such rows out, or `allow` where the "
                    "text is meant to hold it",
                )
        if isinstance(example, Completion):
            return self._completion(example)
        text, trained = self._conversation(example)
        return Encoded(ids=text.ids, trained=trained)

    @functools.cached_property
    def _conversation(self) -> ConversationEncoder:
        return ConversationEncoder(self.tokens, self.stage.loss, self.stage.today)

    def _completion(self, example: Completion) -> Encoded:
        text = self.tokens(example.prompt + example.completion)
        start = 0 if self.stage.loss == "all" else len(example.prompt)
        trained = text.inside([(start, len(example.prompt) + len(example.completion))])
        end = self.tokens.tokenizer.eos_token_id
        if end is None:
            raise StageError("the tokenizer has no eos_token to end a completion with")
        before = np.zeros(len(self.start), dtype=bool)
        return Encoded(
            ids=np.concatenate([np.array(self.start, np.int64), text.ids, [end]]),
            trained=np.concatenate([before, trained, [True]]),
        )

    def _truncated(self, row: Row, encoded: Encoded) -> Encoded | Dropped:
        """Return at most `sequence_length` + 1 tokens; Dropped if none of them is trained on."""
        stage, room = self.stage, self.stage.sequence_length + 1
        if not encoded.trained[1:].any():  # nothing predicts the first token
            return Dropped(why="without a token to train on")
        if len(encoded.ids) <= room:
            return encoded
        if stage.too_long == "error":
            tokens = len(encoded.ids) - 1
            raise row.error(f"{tokens} tokens, but `sequence_length` is {stage.sequence_length}")
        if stage.too_long == "drop":
            return Dropped(why="longer than `sequence_length`", long=True)
        if not encoded.trained[1:room].any():
            return Dropped(why="whose trained tokens lie behind `sequence_length`", long=True)
        return Encoded(ids=encoded.ids[:room], trained=encoded.trained[:room], long=True)
