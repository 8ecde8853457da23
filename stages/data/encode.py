"""From an item to token ids with the mask of those that are trained on."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.errors import StageError
from stages.data.formats import FormName, Reader
from stages.data.messages import Completion, Conversation, Item, Tokens
from stages.data.rows import Row

if TYPE_CHECKING:
    from numpy.typing import NDArray


Span = tuple[int, int]
"""Start and end of a range of characters."""
SpecialTokens = Literal["error", "drop", "allow"]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids and, for each, whether it is trained on; shapes (length,), int64 and bool."""

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    long: bool = False
    """Whether there was more of the row than fits a sample."""


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A row that is left out; `why` reads on from "rows"."""

    why: str
    long: bool = False


@dataclass(frozen=True)
class TextTokens:
    """A text's ids (int64, shape (length,)), and the start and end of the characters that each
    stands for (int64, shape (length, 2))."""

    ids: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def inside(self, spans: list[Span]) -> NDArray[np.bool_]:
        """Which tokens share a character with one of the spans; shape (length,)."""
        inside = np.zeros(len(self.bounds), dtype=bool)
        for start, end in spans:
            inside |= (self.bounds[:, 0] < end) & (self.bounds[:, 1] > start)
        return inside


@dataclass(frozen=True)
class TextTokenizer:
    """A fast tokenizer, asked for what the encoders need."""

    tokenizer: Any

    def __call__(self, text: str) -> TextTokens:
        """Tokens of a text that has its special tokens already."""
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        # Tokenizers leave white space out of offsets as they like; it belongs to the token behind.
        reached = np.maximum.accumulate(offsets[:, 1])
        before = np.concatenate([[0], reached[:-1]])
        bounds = np.stack([np.minimum(offsets[:, 0], before), offsets[:, 1]], axis=1)
        return TextTokens(np.array(encoded["input_ids"], dtype=np.int64), bounds)

    @functools.cached_property
    def special(self) -> Mapping[int, str]:
        """Id -> text of the special tokens."""
        known = self.tokenizer.added_tokens_decoder
        return {index: str(token) for index, token in known.items() if token.special}

    @functools.cached_property
    def _spelled(self) -> re.Pattern[str] | None:
        texts = sorted(self.special.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    def spelled_in(self, value: Any) -> str | None:
        """A special token that some text within `value` spells out."""
        if self._spelled is None:
            return None
        found = (self._spelled.search(text) for text in _texts(value))
        return next((match.group() for match in found if match), None)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _texts(child)
    elif isinstance(value, list):
        for child in value:
            yield from _texts(child)


@dataclass(frozen=True)
class Encoder:
    """Encodes items of every kind."""

    tokens: TextTokenizer
    conversation: Any
    """What encodes a Conversation."""
    special_tokens: SpecialTokens
    start: list[int]
    """Ids that a completion's text begins with; they are not trained on."""
    whole: bool
    """Whether prompts are trained on as well."""

    def __call__(self, item: Item) -> Encoded | Dropped:
        """Raises DataError when the item cannot be encoded."""
        if isinstance(item, Tokens):
            return Encoded(ids=np.array(item.ids, np.int64), trained=np.array(item.trained, bool))
        spelled = self._spelled(item)
        if spelled is not None:
            if self.special_tokens == "drop":
                return Dropped(why="whose text spells a special token")
            raise item.row.error(
                f"its text spells the special token {spelled!r}",
                hint="set `special_tokens: drop` to leave such rows out, or `allow` where the text "
                "is meant to hold it",
            )
        if isinstance(item, Completion):
            return self._completion(item)
        encoded: Encoded = self.conversation(item)
        return encoded

    def _spelled(self, item: Conversation | Completion) -> str | None:
        if self.special_tokens == "allow":
            return None
        return self.tokens.spelled_in(item.texts())

    def _completion(self, item: Completion) -> Encoded:
        text = self.tokens(item.prompt + item.completion)
        start = 0 if self.whole else len(item.prompt)
        trained = text.inside([(start, len(item.prompt) + len(item.completion))])
        end = self.tokens.tokenizer.eos_token_id
        if end is None:
            raise StageError("the tokenizer has no eos_token to end a completion with")
        before = np.zeros(len(self.start), dtype=bool)
        return Encoded(
            ids=np.concatenate([np.array(self.start, np.int64), text.ids, [end]]),
            trained=np.concatenate([before, trained, [True]]),
        )


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
