"""Conversations as text, and which of its tokens are trained on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline import DataError
from stages.data.encodings import TextTokenizer
from stages.data.messages import Conversation
from stages.data.rendering import Renderer
from stages.data.rows import require_text
from stages.data.token_sizes import Span, TextTokens

if TYPE_CHECKING:
    from stages.data.chat import ChatData


AHEAD = 1 << 24
"""Characters of messages that are rendered ahead at most, each in as many parts as it is in."""
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


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

    def ahead(self, chats: Sequence[Conversation]) -> None:
        """Render what `text` and `trained` will need of the conversations, as far as it is not too
        much at once."""
        left, parts = AHEAD, list[tuple[Conversation, int, bool]]()
        for chat in chats:
            own = list(self._parts(chat))
            left -= len(own) * sum(len(str(each.get("content"))) for each in chat.messages)
            if left < 0:
                break
            parts += own
        self._rendered.ahead(parts)

    def text(self, chat: Conversation) -> str:
        """Return the text of a conversation. Raises DataError if it cannot be rendered."""
        self._rendered.template(chat)
        text = self._rendered.text(chat, len(chat.messages))
        return require_text(chat.row, text, "the text of the conversation")

    def trained(self, chat: Conversation, text: str, tokens: TextTokens) -> NDArray[np.bool_]:
        """Return which tokens of its text are trained on. Raises DataError if its turns cannot be
        located."""
        located = self._located(chat)
        if self.stage.loss == "all":
            return ~tokens.inside([self._span(chat, text, *each) for each in located])
        turns = [index for index, _ in located]
        if self._has_markers(chat):
            return self._marked(chat, text, tokens, turns)
        spans = [self._span(chat, text, *each) for each in located]
        special = tokens.bounds[self.tokens.are_special(tokens.ids)]
        return tokens.inside([_without_tail(text, special, span) for span in spans])

    @functools.cached_property
    def _rendered(self) -> Renderer:
        return Renderer(self.tokens.tokenizer, self.stage.today)

    def _has_markers(self, chat: Conversation) -> bool:
        return bool(_MARKERS.search(self._rendered.template(chat)))

    def _located(self, chat: Conversation) -> list[tuple[int, bool]]:
        """Return the messages whose characters are looked for, and whether to look behind their
        generation prompt: those not to train on if all else is trained on, or those to train on."""
        assistant = chat.assistant_turns()
        if self.stage.loss == "all":
            return [(index, index in assistant) for index in sorted(chat.silent)]
        prompt = not self._has_markers(chat)
        return [(index, prompt) for index in self._trained_turns(chat)]

    def _parts(self, chat: Conversation) -> Iterator[tuple[Conversation, int, bool]]:
        """Yield the parts of a conversation that are rendered."""
        if not self.tokens.tokenizer.chat_template:
            return
        whole = len(chat.messages)
        yield chat, whole, False
        with contextlib.suppress(Exception):  # there may be no template for these tools
            for index, prompt in self._located(chat):
                if index:
                    yield chat, index, prompt
                if index + 1 < whole:
                    yield chat, index + 1, False

    def _trained_turns(self, chat: Conversation) -> list[int]:
        first = 0 if self.stage.loss == "assistant" else chat.first
        turns = [index for index in chat.assistant_turns() if index >= first]
        turns = turns[-1:] if self.stage.loss == "last" else turns
        return [index for index in turns if index not in chat.silent]

    def _span(self, chat: Conversation, text: str, index: int, prompt: bool) -> Span:
        """Return the characters of one message, behind its generation prompt if `prompt`. Where all
        else is trained on, the first message begins with the text."""
        start, end = "", text
        if index:
            start = self._rendered.text(chat, index, prompt=prompt)
        elif prompt and self.stage.loss != "all":
            start = self._opening(chat, text)
        if index + 1 < len(chat.messages):
            end = self._rendered.text(chat, index + 1)
        if not (text.startswith(end) and end.startswith(start)):
            raise chat.row.error(
                f"the chat template renders messages[{index}] differently in a longer "
                "conversation, so that its tokens cannot be located",
                hint="set `loss: last`, or mark the turns in the template with {% generation %}",
            )
        return len(start), len(end)

    def _opening(self, chat: Conversation, text: str) -> str:
        """Return the text before an assistant's turn that opens a conversation: up to the end of
        the first generation prompt, as it follows a user's turn. Raises DataError if it cannot be
        found."""
        user = dataclasses.replace(chat, messages=[{"role": "user", "content": "x"}])
        try:
            asked = self._rendered.text(user, 1)
            prompt = self._rendered.text(user, 1, prompt=True).removeprefix(asked)
        except DataError:
            prompt = ""
        first = self._rendered.text(chat, 1) if len(chat.messages) > 1 else text
        before, found, _ = first.partition(prompt) if prompt else ("", "", "")
        if not found:
            raise chat.row.error(
                "begins with an assistant's message, whose beginning cannot be located: the chat "
                "template lays it out otherwise than its generation prompt",
                hint="set `train: false` in that message, or `loss: last`",
            )
        return before + found

    def _marked(
        self, chat: Conversation, text: str, tokens: TextTokens, turns: list[int]
    ) -> NDArray[np.bool_]:
        """Return the template's own mask, limited to `turns` unless they are all the assistant's.
        Raises DataError if the markers miss one of them."""
        encoded = self._rendered.apply(
            chat,
            chat.messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        marked = np.array(encoded["assistant_masks"], dtype=bool)
        everything = turns == chat.assistant_turns()
        try:
            spans = [self._span(chat, text, index, False) for index in turns]
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


def _without_tail(text: str, special: NDArray[np.int64], span: Span) -> Span:
    """Return `span` up to its last special token if only white space follows that. `special`:
    start and end of each special token; shape (special tokens, 2)."""
    start, end = span
    within = special[(special[:, 0] < end) & (special[:, 1] > start)]
    if not len(within):
        return span
    behind = int(within[-1, 1])
    return (start, behind) if not text[behind:end].strip() else span
