"""Rows and conversations encoded as token ids, with the mask of those that are trained on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline import DataError, StageError
from stages.data import forms
from stages.data.conversations import ConversationEncoder
from stages.data.encodings import TextTokenizer
from stages.data.forms import Completion, Example, Form, Tokens
from stages.data.messages import Conversation
from stages.data.mistakes import Mistake
from stages.data.names import Names
from stages.data.rows import Row
from stages.data.token_sizes import TextTokens

if TYPE_CHECKING:
    from stages.data.chat import ChatData


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids and, for each, whether it is trained on (bool); shapes (length,)."""

    ids: NDArray[Any]
    trained: NDArray[np.bool_]
    long: bool = False
    """Whether the row was longer than a sample and has been truncated."""
    nulls: str = ""
    """Place of a null that was removed, as in Row."""


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A row that is left out. `why` continues a sentence that begins with "rows"."""

    why: str
    long: bool = False


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Encodes rows by the fields of `data.chat`; a pure function of each row."""

    stage: ChatData
    names: Names
    tokens: TextTokenizer
    vocab_size: int
    """Bound of the ids of pre-tokenised rows."""
    start: list[int]
    """Ids to put before a text; they are not trained on."""
    dtype: str
    """Type of the ids, which holds all of them."""

    def batch(self, rows: Sequence[tuple[Form, Row]]) -> list[Encoded | Dropped | Mistake]:
        """Encode rows in order; a Mistake stands for each that cannot be used."""
        try:
            return [*self._together(rows)]
        except DataError:  # of any row: each step is done for all rows
            return [self._alone(row) for row in rows]

    def _alone(self, row: tuple[Form, Row]) -> Encoded | Dropped | Mistake:
        try:
            return self._together([row])[0]
        except DataError as error:
            return Mistake(message=error.message, hint=error.hint)

    def _together(self, rows: Sequence[tuple[Form, Row]]) -> list[Encoded | Dropped]:
        """Encode rows with one call of the tokenizer."""
        examples = [self._example(form, row) for form, row in rows]
        self._conversation.ahead([each for each in examples if isinstance(each, Conversation)])
        texts = [self._text(example) for example in examples]
        found = iter(self.tokens([text for text in texts if text is not None]))
        results = [
            self._encoded(example, text, next(found)) if text is not None else self._given(example)
            for example, text in zip(examples, texts, strict=True)
        ]
        cut = [self._cut(row, result) for (_, row), result in zip(rows, results, strict=True)]
        return [_with_nulls(*each) for each in zip(examples, cut, strict=True)]

    def _example(self, form: Form, row: Row) -> Example | Dropped:
        stage = self.stage
        example = forms.read(
            row, form, template=stage.template, names=self.names, vocab_size=self.vocab_size
        )
        if isinstance(example, Tokens) or stage.special_tokens == "allow":
            return example
        spelled = self.tokens.spelled_in(example.texts())
        if spelled is not None and stage.special_tokens == "drop":
            return Dropped(why="whose text spells a special token")
        if spelled is not None:
            raise row.error(
                f"its text spells the special token {spelled!r}",
                hint="set `special_tokens: drop` to leave such rows out, or `allow` where the "
                "text is meant to hold it",
            )
        return example

    def _text(self, example: Example | Dropped) -> str | None:
        """Return the text to tokenise, if there is one."""
        if isinstance(example, Completion):
            return example.prompt + example.completion
        return self._conversation.text(example) if isinstance(example, Conversation) else None

    def _given(self, example: Example | Dropped) -> Encoded | Dropped:
        """Return the result of an example without a text."""
        if isinstance(example, Dropped):
            return example
        assert isinstance(example, Tokens)
        return Encoded(ids=np.array(example.ids, np.int64), trained=np.array(example.trained, bool))

    def _encoded(self, example: Example | Dropped, text: str, tokens: TextTokens) -> Encoded:
        if isinstance(example, Completion):
            return self._completion(example, tokens)
        assert isinstance(example, Conversation)
        trained = self._conversation.trained(example, text, tokens)
        return Encoded(ids=tokens.ids, trained=trained)

    @functools.cached_property
    def _conversation(self) -> ConversationEncoder:
        return ConversationEncoder(self.tokens, self.stage)

    def _completion(self, example: Completion, text: TextTokens) -> Encoded:
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

    def _cut(self, row: Row, encoded: Encoded | Dropped) -> Encoded | Dropped:
        """Return at most `sequence_length` + 1 tokens, in the dtype of the cache; Dropped if none
        of them is trained on."""
        result = self._truncated(row, encoded)
        if isinstance(result, Dropped):
            return result
        return dataclasses.replace(result, ids=result.ids.astype(self.dtype))

    def _truncated(self, row: Row, encoded: Encoded | Dropped) -> Encoded | Dropped:
        """Return at most `sequence_length` + 1 tokens; Dropped if none of them is trained on."""
        stage, room = self.stage, self.stage.sequence_length + 1
        if isinstance(encoded, Dropped):
            return encoded
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


def _with_nulls(example: Example | Dropped, result: Encoded | Dropped) -> Encoded | Dropped:
    """Return a row's result with the nulls that were removed from it."""
    if isinstance(result, Dropped) or not isinstance(example, Conversation):
        return result
    return dataclasses.replace(result, nulls=example.row.nulls) if example.row.nulls else result
