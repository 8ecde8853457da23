"""Rows and conversations encoded as token ids, with the mask of those that are trained on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline import DataError, StageError
from stages.data import forms, tokenize
from stages.data.conversations import UNRENDERED, ConversationEncoder, LaidOut, Unrendered
from stages.data.encodings import TextTokenizer, TextTokens
from stages.data.forms import Completion, Example, Form, Tokens
from stages.data.marks import says_nothing
from stages.data.messages import Conversation
from stages.data.mistakes import Mistake
from stages.data.names import Names
from stages.data.rows import Row

if TYPE_CHECKING:
    from stages.data.chat import ChatData


EMPTY_ANSWER = "with an empty answer"
"""Why a row is dropped."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids and, for each, whether it is trained on (bool); shapes (length,)."""

    ids: NDArray[Any]
    trained: NDArray[np.bool_]
    long: bool = False
    """Whether the row was longer than a sample and has been truncated."""
    kept_more: bool = False
    """Whether earlier versions, which cut rows to one token more, had another sample."""
    nulls: str = ""
    """Place of a null that was removed, as in Row."""
    notes: tuple[str, ...] = ()
    """Things to report of the row. Each continues a sentence that begins with "rows"."""


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A row that is left out. `why` continues a sentence that begins with "rows"."""

    why: str
    long: bool = False
    kept_more: bool = False
    """As in Encoded."""


_Found = Example | LaidOut | Dropped | Mistake
P = ParamSpec("P")
R = TypeVar("R")


def _tried(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | Mistake:
    """Call a function, and return the mistake of a row that it finds."""
    try:
        return function(*args, **kwargs)
    except DataError as error:
        return Mistake(message=error.message, hint=error.hint)


def _together(
    samples: Sequence[Encoded | Dropped | Mistake],
) -> list[Encoded | Dropped] | Mistake:
    """Return the samples of a row, or the first mistake among them."""
    kept = list[Encoded | Dropped]()
    for each in samples:
        if isinstance(each, Mistake):
            return each
        kept.append(each)
    return kept


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

    def batch(self, rows: Sequence[tuple[Form, Row]]) -> list[list[Encoded | Dropped] | Mistake]:
        """Encode rows in order, with one call of the tokenizer, each as a sample or as several; a
        Mistake stands for each that cannot be used."""
        examples = [self._examples(form, row) for form, row in rows]
        flat = [example for each in examples for example in each]
        self._conversation.ahead([each for each in flat if isinstance(each, Conversation)])
        laid_out = [_tried(self._laid_out, example) for example in flat]
        texts = [
            each.turns.text if isinstance(each, LaidOut) else each.prompt + each.completion
            for each in laid_out
            if isinstance(each, LaidOut | Completion)
        ]
        found = iter(self.tokens(texts))
        results = iter([_tried(self._encoded, example, found) for example in laid_out])
        return [
            _together([_tried(self._cut, row, next(results)) for _ in each])
            for (_, row), each in zip(rows, examples, strict=True)
        ]

    def _examples(self, form: Form, row: Row) -> Sequence[Example | Dropped | Mistake]:
        """Return a row as one example, or as one for each turn."""
        example = _tried(self._example, form, row)
        if self.stage.turns == "together" or not isinstance(example, Conversation):
            return [example]
        turns = self._conversation.trained_turns(example)
        return [example.until(turn) for turn in turns] or [example]

    def _example(self, form: Form, row: Row) -> Example | Dropped:
        stage = self.stage
        example = forms.read(
            row, form, template=stage.template, names=self.names, vocab_size=self.vocab_size
        )
        if isinstance(example, Conversation) and self._is_empty(example):
            return Dropped(why=EMPTY_ANSWER)
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

    def _is_empty(self, chat: Conversation) -> bool:
        """Whether a conversation is dropped for an answer that says nothing. Raises DataError where
        that is an error."""
        turns = self._conversation.trained_turns(chat)
        empty = [index for index in turns if says_nothing(chat.messages[index])]
        if empty and self.stage.empty == "error":
            raise chat.row.error(
                f"messages[{empty[0]}] is an answer that says nothing",
                hint="set `empty: drop` to leave such rows out, or `train` to train on the end of "
                "the turn",
            )
        return bool(empty) and self.stage.empty == "drop"

    def _laid_out(self, example: Example | Dropped | Mistake) -> _Found:
        if not isinstance(example, Conversation):
            return example
        try:
            return self._conversation.lay_out(example)
        except Unrendered:
            if self.stage.unrendered != "drop":
                raise
            return Dropped(why=UNRENDERED)

    def _encoded(self, example: _Found, found: Iterator[TextTokens]) -> Encoded | Dropped | Mistake:
        """Return the result of an example; if it has a text, `found` yields its tokens next."""
        if isinstance(example, Dropped | Mistake):
            return example
        if isinstance(example, Tokens):
            trained = np.array(example.trained, bool)
            return Encoded(ids=np.array(example.ids, np.int64), trained=trained)
        tokens = next(found)
        if isinstance(example, Completion):
            return self._completion(example, tokens)
        assert isinstance(example, LaidOut)
        targets = self._conversation.targets(example, tokens)
        chat = example.turns.chat
        says = any(message["role"] == "assistant" for message in chat.messages)
        if not says and not targets.trained.any():
            return Dropped(why="without a message of the assistant")
        return Encoded(
            ids=np.concatenate([tokens.ids, np.array(targets.end, np.int64)]),
            trained=np.concatenate([targets.trained, np.ones(len(targets.end), bool)]),
            nulls=chat.row.nulls,
            notes=(*example.notes, *targets.notes),
        )

    @functools.cached_property
    def _conversation(self) -> ConversationEncoder:
        return ConversationEncoder(self.tokens, self.stage)

    def _completion(self, example: Completion, text: TextTokens) -> Encoded:
        """Return a text with its start and end token, which it may have already."""
        start = 0 if self.stage.loss == "all" else len(example.prompt)
        trained = text.inside([(start, len(example.prompt) + len(example.completion))])
        end = self.tokens.tokenizer.eos_token_id
        if end is None:
            raise StageError("the tokenizer has no eos_token to end a completion with")
        begun = tokenize.begins_with(text.ids, self.start)
        ended = tokenize.ends_with(example.completion, self.tokens.tokenizer.eos_token)
        before, after = [] if begun else self.start, [] if ended else [end]
        return Encoded(
            ids=np.concatenate([np.array(before, np.int64), text.ids, after]).astype(np.int64),
            trained=np.concatenate(
                [np.zeros(len(before), bool), trained, np.ones(len(after), bool)]
            ),
            notes=(tokenize.FORMATTED,) if ended or (begun and self.start) else (),
        )

    def _cut(self, row: Row, encoded: Encoded | Dropped | Mistake) -> Encoded | Dropped | Mistake:
        """Return at most `sequence_length` tokens, in the dtype of the cache; Dropped if none of
        them is trained on."""
        stage, room = self.stage, self.stage.sequence_length
        if not isinstance(encoded, Encoded):
            return encoded
        if not encoded.trained[1:].any():  # nothing predicts the first token
            return Dropped(why="without a token to train on")
        if len(encoded.ids) <= room:
            return dataclasses.replace(encoded, ids=encoded.ids.astype(self.dtype))
        if stage.too_long == "error":
            raise row.error(f"{len(encoded.ids)} tokens, but `sequence_length` is {room}")
        one_more = len(encoded.ids) == room + 1
        if stage.too_long == "drop":
            return Dropped(why="longer than `sequence_length`", long=True, kept_more=one_more)
        one_more |= bool(encoded.trained[1 : room + 1].any())
        if not encoded.trained[1:room].any():
            why = "whose trained tokens all come after `sequence_length`"
            return Dropped(why=why, long=True, kept_more=one_more)
        return dataclasses.replace(
            encoded,
            ids=encoded.ids[:room].astype(self.dtype),
            trained=encoded.trained[:room],
            long=True,
            kept_more=one_more,
        )
