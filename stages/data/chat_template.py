"""Which tokens of a rendered conversation are trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.errors import DataError
from stages.data.chat import with_today
from stages.data.encode import Encoded, Span, TextTokenizer, TextTokens
from stages.data.messages import Conversation

if TYPE_CHECKING:
    from numpy.typing import NDArray

Loss = Literal["completion", "assistant", "last", "all"]
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_HINT = "set `loss: last`, or mark the turns in the template with {% generation %}"


@dataclass(frozen=True)
class ConversationEncoder:
    """Turns conversations into tokens with their mask.

    The text of a conversation is rendered whole and tokenised whole. A turn is what the text gains
    between the rendering up to the turn (for an assistant's, with the generation prompt), and the
    rendering up to and with the turn. White space that the template puts behind the end-of-turn
    token is not trained on: generation has stopped there. A template with {% generation %} markers
    says itself what the assistant wrote: what it marks of an assistant's message, the header that
    leads in to it included, is trained on.
    """

    tokens: TextTokenizer
    loss: Loss
    today: str
    """The date that the template is told, YYYY-MM-DD."""

    def __call__(self, item: Conversation) -> Encoded:
        """Raises DataError when the row cannot be rendered or its turns cannot be told."""
        if not self.tokens.tokenizer.chat_template:
            raise item.row.error(
                "the model's tokenizer has no chat template",
                hint="use an instruction-tuned model, or `template: false` for pairs of texts",
            )
        text = self._render(item, item.messages)
        tokens = self.tokens(text)
        if self.loss == "all":
            assistant = _assistant(item)
            left_out = [
                self._span(item, text, index, prompt=index in assistant)
                for index in sorted(item.silent)
            ]
            return Encoded(ids=tokens.ids, trained=~tokens.inside(left_out))
        turns = self._trained_turns(item)
        if self._has_markers(item):
            return Encoded(ids=tokens.ids, trained=self._marked(item, text, tokens, turns))
        spans = [self._turn(item, text, index) for index in turns]
        kept = [self._without_tail(text, tokens, span) for span in spans]
        return Encoded(ids=tokens.ids, trained=tokens.inside(kept))

    def _render(
        self, item: Conversation, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False
    ) -> str:
        try:
            text = self.tokens.tokenizer.apply_chat_template(
                list(messages),
                chat_template=with_today(self._template(item), self.today),
                tokenize=False,
                add_generation_prompt=prompt,
                **item.extra,
            )
        except Exception as error:  # a template is a program of its own and may raise anything
            raise item.row.error(f"the chat template refuses it: {error}") from error
        return str(text)

    def _trained_turns(self, item: Conversation) -> list[int]:
        first = 0 if self.loss == "assistant" else item.first
        turns = [i for i in _assistant(item) if i >= first]
        turns = turns[-1:] if self.loss == "last" else turns
        return [index for index in turns if index not in item.silent]

    def _turn(self, item: Conversation, text: str, index: int) -> Span:
        """The characters of an assistant's turn that is trained on."""
        if index == 0:
            raise item.row.error("begins with an assistant message, which answers nothing")
        return self._span(item, text, index, prompt=True)

    def _span(self, item: Conversation, text: str, index: int, *, prompt: bool) -> Span:
        """The characters that one message is rendered as, those behind the generation prompt if so
        asked; the first one's begin with the text."""
        start, end = "", text
        if index:
            start = self._render(item, item.messages[:index], prompt=prompt)
        if index + 1 < len(item.messages):
            end = self._render(item, item.messages[: index + 1])
        if not (text.startswith(end) and end.startswith(start)):
            raise item.row.error(
                f"the chat template renders messages[{index}] differently in a longer "
                "conversation, so that its tokens cannot be told",
                hint=_HINT,
            )
        return len(start), len(end)

    def _without_tail(self, text: str, tokens: TextTokens, span: Span) -> Span:
        """`span` up to its last special token if only white space follows that."""
        start, end = span
        special = np.isin(tokens.ids, list(self.tokens.special)) & tokens.inside([span])
        if not special.any():
            return span
        behind = int(tokens.bounds[special][-1, 1])
        return (start, behind) if not text[behind:end].strip() else span

    def _template(self, item: Conversation) -> str:
        return str(self.tokens.tokenizer.get_chat_template(None, item.extra.get("tools")))

    def _has_markers(self, item: Conversation) -> bool:
        return _MARKERS.search(self._template(item)) is not None

    def _marked(
        self, item: Conversation, text: str, tokens: TextTokens, turns: list[int]
    ) -> NDArray[np.bool_]:
        """The template's own mask; cut down to the messages that are trained on, if not to all that
        the assistant says."""
        marked = self._own_mask(item)
        everything = turns == _assistant(item)
        try:
            spans = [self._span(item, text, index, prompt=False) for index in turns]
        except DataError:
            if everything and marked.any():
                return marked  # nothing to check against: an earlier turn is rendered otherwise now
            raise
        missed = [
            index
            for index, span in zip(turns, spans, strict=True)
            if _says_something(item, index) and not (marked & tokens.inside([span])).any()
        ]
        if missed:
            raise item.row.error(
                "the chat template's {% generation %} markers do not mark the assistant's turns",
                hint="correct the template, or remove the markers",
            )
        return marked if everything else marked & tokens.inside(spans)

    def _own_mask(self, item: Conversation) -> NDArray[np.bool_]:
        encoded = self.tokens.tokenizer.apply_chat_template(
            list(item.messages),
            chat_template=with_today(self._template(item), self.today),
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
            **item.extra,
        )
        return np.array(encoded["assistant_masks"], dtype=bool)


def _says_something(item: Conversation, index: int) -> bool:
    message = item.messages[index]
    return bool(message.get("content") or message.get("tool_calls"))


def _assistant(item: Conversation) -> list[int]:
    return [index for index, each in enumerate(item.messages) if each["role"] == "assistant"]
