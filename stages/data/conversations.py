"""Conversations as text, and which of its tokens are trained on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline import DataError
from stages.data.encodings import Span, TextTokenizer, TextTokens
from stages.data.layouts import layouts, prints_python
from stages.data.marks import THOUGHTS, says_nothing
from stages.data.messages import Conversation
from stages.data.rendering import Refused, Renderer
from stages.data.rows import require_text
from stages.data.turns import Turns
from stages.model.chat_template import MARKERS

if TYPE_CHECKING:
    from stages.data.chat import ChatData


AHEAD = 1 << 24
"""Characters of messages that are rendered ahead at most, each in as many parts as it is in."""
ENDED = "whose turns end with the token that begins the next message, since no other ends them"
LAID_OUT = "whose messages were given to the chat template in another form that says the same"
ENDLESS = "with turns that no special token ends, so that the model is not trained to stop"
EMPTY = "with an empty answer, which is trained as the end of a turn"
UNSHOWN = "with `tools` or `documents` that the chat template does not show"
UNRENDERED = "whose chat template leaves out part of what is said"
"""Notes on rows: they continue a sentence that begins with "rows"."""


class Unrendered(DataError):
    """A row of which the template leaves something out."""


@dataclass(frozen=True)
class LaidOut:
    """A conversation in the form that its template takes, with its text and turns."""

    turns: Turns
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Targets:
    """Which tokens of a text are trained on (bool, shape (length,)), and ids that are trained on
    after the text."""

    trained: NDArray[np.bool_]
    end: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes conversations as tokens with their mask.

    The text of a conversation is rendered whole and tokenised whole. `Turns` finds the assistant's
    turns in it, from the end of the generation prompt to the end of the turn. White space that the
    template puts behind the end-of-turn token is not trained on, since generation stops before it.
    A turn that nothing ends is ended by the token that begins the next message, as GLM's. A
    template with {% generation %} markers decides itself: the marked part of an assistant's
    message, with a header if that is marked, is trained on.
    """

    tokens: TextTokenizer
    stage: ChatData

    def ahead(self, chats: Sequence[Conversation]) -> None:
        """Render what `lay_out` and `targets` will need of the conversations, as far as it is not
        too much at once."""
        left, parts = AHEAD, list[tuple[Conversation, int, bool]]()
        for chat in chats:
            own = list(self._parts(chat))
            left -= len(own) * sum(len(str(each.get("content"))) for each in chat.messages)
            if left < 0:
                break
            parts += own
        self._rendered.ahead(parts)

    def lay_out(self, chat: Conversation) -> LaidOut:
        """Return a conversation in the first form that the template renders without leaving out
        anything that is said. Raises DataError if there is none, but under `unrendered: allow`."""
        template, trained = self._rendered.template(chat), self.trained_turns(chat)
        unshown = any(chat.extra.get(key) and key not in template for key in ("tools", "documents"))
        best: tuple[LaidOut, list[tuple[int, str]]] | None = None
        refused = list[Refused]()
        for messages in layouts(chat.messages):
            same = messages is chat.messages
            form = chat if same else dataclasses.replace(chat, messages=messages)
            try:
                text = self._rendered.text(form, len(messages))
            except Refused as error:
                refused.append(error)
                continue
            turns = Turns(self._rendered, form, text, self.tokens.spelled)
            lost = turns.lost(trained)
            if prints_python(messages, text):
                lost.append((-1, "the JSON of arguments, which it prints as Python does"))
            if best is None or len(lost) < len(best[1]):
                require_text(chat.row, text, "the text of the conversation")
                notes = (*([] if same else [LAID_OUT]), *([UNSHOWN] if unshown else []))
                best = LaidOut(turns, notes), lost
            if not lost:
                break
        if best is None:
            raise self._rendered.explained(chat, *refused)
        if not best[1]:
            return best[0]
        if self.stage.unrendered != "allow":
            raise _unrendered(chat, best[1])
        return dataclasses.replace(best[0], notes=(*best[0].notes, UNRENDERED))

    def targets(self, laid_out: LaidOut, tokens: TextTokens) -> Targets:
        """Return which tokens of its text are trained on. Raises DataError if its turns cannot be
        located."""
        turns, chat = laid_out.turns, laid_out.turns.chat
        located = self._located(chat)
        if self.stage.loss == "all":
            silent = [turns.span(index, prompt=prompt) for index, prompt in located]
            return Targets(~tokens.inside(silent))
        indices = [index for index, _ in located]
        empty = any(says_nothing(chat.messages[index]) for index in indices)
        notes: tuple[str, ...] = (EMPTY,) if empty else ()
        if self._has_markers(chat):
            return Targets(self._marked(chat, turns, tokens, indices), notes=notes)
        special = tokens.bounds[self.tokens.are_special(tokens.ids)]
        spans, end = list[Span](), tuple[int, ...]()
        for index, prompt in located:
            span = _without_tail(turns.text, special, turns.span(index, prompt=prompt))
            if not (special[:, 1] == span[1]).any():
                span, end, note = self._ended(turns, span)
                notes += (note,)
            spans.append(span)
        return Targets(tokens.inside(spans), end, notes)

    def trained_turns(self, chat: Conversation) -> list[int]:
        """Return the indices of the messages that are trained on."""
        first = 0 if self.stage.loss in ("assistant", "all") else chat.first
        turns = [index for index in chat.assistant_turns() if index >= first]
        turns = turns[-1:] if self.stage.loss == "last" else turns
        return [index for index in turns if index not in chat.silent]

    @functools.cached_property
    def _rendered(self) -> Renderer:
        return Renderer(self.tokens.tokenizer, self.stage.today)

    def _has_markers(self, chat: Conversation) -> bool:
        return bool(MARKERS.search(self._rendered.template(chat)))

    def _located(self, chat: Conversation) -> list[tuple[int, bool]]:
        """Return the messages whose characters are looked for, and whether to look behind their
        generation prompt: those not to train on if all else is trained on, or those to train on."""
        assistant = chat.assistant_turns()
        if self.stage.loss == "all":
            return [(index, 0 < index in assistant) for index in sorted(chat.silent)]
        prompt = not self._has_markers(chat)
        return [(index, prompt) for index in self.trained_turns(chat)]

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

    def _ended(self, turns: Turns, span: Span) -> tuple[Span, tuple[int, ...], str]:
        """Return a span with the token that begins the next message, which the model says to end
        its turn where nothing else does; after the last message, that token's id; and a note."""
        start, end = span
        rest = turns.text[end:] or turns.after()
        found = self.tokens.spelled.match(rest)
        if found is None or found.group() == self.tokens.tokenizer.bos_token:
            return span, (), ENDLESS
        if end < len(turns.text):
            return (start, end + found.end()), (), ENDED
        return span, (self.tokens.tokenizer.convert_tokens_to_ids(found.group()),), ENDED

    def _marked(
        self, chat: Conversation, located: Turns, tokens: TextTokens, turns: list[int]
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
            spans = [located.span(index, prompt=False) for index in turns]
        except DataError:
            if everything and marked.any():
                return marked  # turns that are rendered differently here cannot be compared
            raise
        for index, span in zip(turns, spans, strict=True):
            found = (marked & tokens.inside([span])).any()
            if not found and not says_nothing(chat.messages[index]):
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


def _unrendered(chat: Conversation, lost: Sequence[tuple[int, str]]) -> Unrendered:
    index, said = lost[0]
    where = f" of messages[{index}]" if index >= 0 else ""
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    hint = "name a template that lays it out in `model.chat_template`"
    if said == THOUGHTS and (len(chat.messages) - 1, THOUGHTS) not in lost:
        hint = "set `turns: each` or `loss: last`, which train a turn as it is at inference"
    return Unrendered(
        f"the chat template leaves out {said}{where}{more}",
        file=chat.row.file,
        row=chat.row.number,
        hint=f"{hint}, or set `unrendered: allow` to train on what is left",
    )
