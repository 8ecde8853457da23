"""Rows and conversations encoded as token ids, with the mask of those that are trained on."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline import DataError, StageError
from stages.data import forms
from stages.data.encodings import TextTokenizer
from stages.data.forms import Completion, Example, Form, Tokens
from stages.data.messages import Conversation
from stages.data.rows import Row
from stages.data.token_sizes import Span, TextTokens

if TYPE_CHECKING:
    from stages.data.chat import ChatData


_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DIRECTIVES = "aAbBcCdDeFgGhHIjmMnpRStTuUVwWxXyYzZ"
_UNPADDED = "deHIjmMSUWy"
"""Directives with a form without leading zeros, written `%-d`."""


def with_date(template: str, date: str) -> str:
    """Return a chat template whose `strftime_now` formats midnight of `date` (YYYY-MM-DD).

    It is replaced by a macro, since templates cannot be given functions, and a macro takes
    precedence over transformers' own function.
    """
    if "strftime_now" not in template:
        return template
    midnight = datetime.datetime.fromisoformat(date)
    directives = [f"%{letter}" for letter in _DIRECTIVES] + [f"%-{letter}" for letter in _UNPADDED]
    filled = "".join(f'|replace("{each}", "{midnight.strftime(each)}")' for each in directives)
    # The template stays at the beginning of a line, where its first white space means the same.
    return (
        '{% macro strftime_now(format) %}{% for part in format.split("%%") %}'
        '{{ "" if loop.first else "%" }}{{ part' + filled + " }}{% endfor %}{% endmacro %}\n"
    ) + template


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes conversations as tokens with their mask.

    The text of a conversation is rendered whole and tokenised whole. A turn is the text between the
    rendering of the messages before it (with the generation prompt for an assistant's turn) and the
    rendering that includes it. White space that the template puts behind the end-of-turn token is
    not trained on, since generation stops before it. A template with {% generation %} markers
    decides itself: the marked part of an assistant's message, with a header if that is marked, is
    trained on.
    """

    tokens: TextTokenizer
    stage: ChatData

    def text(self, chat: Conversation) -> str:
        """Return the text of a conversation. Raises DataError if it cannot be rendered."""
        if not self.tokens.tokenizer.chat_template:
            raise chat.row.error(
                "the model's tokenizer has no chat template",
                hint="use an instruction-tuned model, or `template: false` for pairs of texts",
            )
        return self._render(chat, chat.messages)

    def trained(self, chat: Conversation, text: str, tokens: TextTokens) -> NDArray[np.bool_]:
        """Return which tokens of its text are trained on. Raises DataError if its turns cannot be
        located."""
        if self.stage.loss == "all":
            assistant = chat.assistant_turns()
            silent = [
                self._span(chat, text, index, prompt=index in assistant)
                for index in sorted(chat.silent)
            ]
            return ~tokens.inside(silent)
        turns = self._trained_turns(chat)
        if _MARKERS.search(self._template(chat)):
            return self._marked(chat, text, tokens, turns)
        if turns[:1] == [0]:
            raise chat.row.error("begins with an assistant message, which answers nothing")
        spans = [self._span(chat, text, index, prompt=True) for index in turns]
        return tokens.inside([self._without_tail(text, tokens, span) for span in spans])

    def _template(self, chat: Conversation) -> str:
        return str(self.tokens.tokenizer.get_chat_template(None, chat.extra.get("tools")))

    def _apply(
        self, chat: Conversation, messages: Sequence[Mapping[str, Any]], **arguments: Any
    ) -> Any:
        return self.tokens.tokenizer.apply_chat_template(
            list(messages),
            chat_template=with_date(self._template(chat), self.stage.today),
            **arguments,
            **chat.extra,
        )

    def _render(
        self, chat: Conversation, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False
    ) -> str:
        try:
            text = self._apply(chat, messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is a program of its own and may raise anything
            raise chat.row.error(f"the chat template refuses it: {error}") from error
        return str(text)

    def _trained_turns(self, chat: Conversation) -> list[int]:
        first = 0 if self.stage.loss == "assistant" else chat.first
        turns = [index for index in chat.assistant_turns() if index >= first]
        turns = turns[-1:] if self.stage.loss == "last" else turns
        return [index for index in turns if index not in chat.silent]

    def _span(self, chat: Conversation, text: str, index: int, *, prompt: bool) -> Span:
        """Return the characters of one message, behind its generation prompt if `prompt`. The first
        message begins with the text."""
        start, end = "", text
        if index:
            start = self._render(chat, chat.messages[:index], prompt=prompt)
        if index + 1 < len(chat.messages):
            end = self._render(chat, chat.messages[: index + 1])
        if not (text.startswith(end) and end.startswith(start)):
            raise chat.row.error(
                f"the chat template renders messages[{index}] differently in a longer "
                "conversation, so that its tokens cannot be located",
                hint="set `loss: last`, or mark the turns in the template with {% generation %}",
            )
        return len(start), len(end)

    def _without_tail(self, text: str, tokens: TextTokens, span: Span) -> Span:
        """Return `span` up to its last special token if only white space follows that."""
        start, end = span
        special = np.isin(tokens.ids, list(self.tokens.special)) & tokens.inside([span])
        if not special.any():
            return span
        behind = int(tokens.bounds[special][-1, 1])
        return (start, behind) if not text[behind:end].strip() else span

    def _marked(
        self, chat: Conversation, text: str, tokens: TextTokens, turns: list[int]
    ) -> NDArray[np.bool_]:
        """Return the template's own mask, limited to `turns` unless they are all the assistant's.
        Raises DataError if the markers miss one of them."""
        encoded = self._apply(
            chat,
            chat.messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        marked = np.array(encoded["assistant_masks"], dtype=bool)
        everything = turns == chat.assistant_turns()
        try:
            spans = [self._span(chat, text, index, prompt=False) for index in turns]
        except DataError:
            if everything and marked.any():
                return marked  # turns that are rendered differently here cannot be compared
            raise
        for index, span in zip(turns, spans, strict=True):
            message = chat.messages[index]
            says_something = message.get("content") or message.get("tool_calls")
            if says_something and not (marked & tokens.inside([span])).any():
                raise chat.row.error(
                    "the chat template's {% generation %} markers do not mark the assistant's "
                    "turns",
                    hint="correct the template, or remove the markers",
                )
        return marked if everything else marked & tokens.inside(spans)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids and, for each, whether it is trained on; shapes (length,), the
    second is bool."""

    ids: NDArray[Any]
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
    dtype: str
    """Type of the ids, which holds all of them."""

    def batch(self, rows: Sequence[tuple[Form, Row]]) -> list[Encoded | Dropped]:
        """Encode rows in order. Raises DataError for the first row that cannot be used."""
        try:
            return self._together(rows)
        except StageError:  # perhaps of a later row: each step is done for all rows
            return [result for row in rows for result in self._together([row])]

    def _together(self, rows: Sequence[tuple[Form, Row]]) -> list[Encoded | Dropped]:
        """Encode rows with one call of the tokenizer."""
        examples = [self._example(form, row) for form, row in rows]
        texts = [self._text(example) for example in examples]
        found = iter(self.tokens([text for text in texts if text is not None]))
        results = [
            self._encoded(example, text, next(found)) if text is not None else self._given(example)
            for example, text in zip(examples, texts, strict=True)
        ]
        return [self._cut(row, result) for (_, row), result in zip(rows, results, strict=True)]

    def _example(self, form: Form, row: Row) -> Example | Dropped:
        stage = self.stage
        example = forms.read(
            row, form, template=stage.template, roles=stage.roles, vocab_size=self.vocab_size
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
