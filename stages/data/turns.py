"""Which tokens of a rendered conversation the assistant wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from pipeline.errors import DataError, StageError
from stages.data.conversations import Completion, Conversation

Turns = Literal["all", "last"]
Span = tuple[int, int]
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids and, for each, whether it is trained on; shapes (length,), int64 and bool."""

    ids: np.ndarray[Any, Any]
    trained: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Encoder:
    """Turns rows into tokens with their mask.

    The text of a conversation is rendered whole and tokenised whole. An assistant turn is what the
    text gains between the rendering up to the turn with the generation prompt, and the rendering up
    to and with the turn. White space that the template puts behind the end-of-turn token is not
    trained on: generation has stopped there. A template with {% generation %} markers says itself
    what the assistant wrote; that is then checked against the turns.
    """

    tokenizer: Any
    turns: Turns

    def __call__(self, item: Conversation | Completion) -> Encoded:
        """Raises DataError when the row cannot be rendered or its turns cannot be told."""
        if isinstance(item, Completion):
            return self._completion(item)
        text = self._render(item, item.messages)
        ids, bounds = self._tokenise(text)
        if not self._has_markers(item):
            spans = [self._without_tail(text, ids, bounds, s) for s in self._spans(item, text)]
            return Encoded(ids=ids, trained=_inside(bounds, spans))
        return Encoded(ids=ids, trained=self._marked(item, text, ids, bounds))

    def _completion(self, item: Completion) -> Encoded:
        ids, bounds = self._tokenise(item.prompt + item.completion)
        start = len(item.prompt)
        trained = _inside(bounds, [(start, start + len(item.completion))])
        end = self.tokenizer.eos_token_id
        if end is None:
            raise StageError("the tokenizer has no eos_token to end a completion with")
        return Encoded(ids=np.append(ids, end), trained=np.append(trained, True))

    def _tokenise(self, text: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Ids, and the (start, end) characters that each stands for: shape (length, 2)."""
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,  # the template has written them already
            return_offsets_mapping=True,
            verbose=False,
        )
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        # Tokenizers leave white space out of offsets as they like; it belongs to the token behind.
        reached = np.maximum.accumulate(offsets[:, 1])
        before = np.concatenate([[0], reached[:-1]])
        bounds = np.stack([np.minimum(offsets[:, 0], before), offsets[:, 1]], axis=1)
        return np.array(encoded["input_ids"], dtype=np.int64), bounds

    def _render(
        self, item: Conversation, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **item.extra
            )
        except Exception as error:  # a template is a program of its own and may raise anything
            raise item.row.error(f"the chat template refuses it: {error}") from error
        return str(text)

    def _spans(self, item: Conversation, text: str) -> list[Span]:
        """The characters of each assistant turn that is trained on, in order."""
        turns = self._trained_turns(item)
        return [self._span(item, text, index) for index in turns]

    def _trained_turns(self, item: Conversation) -> list[int]:
        roles = [message["role"] for message in item.messages]
        turns = [i for i, role in enumerate(roles) if role == "assistant" and i >= item.first]
        return turns[-1:] if self.turns == "last" else turns

    def _span(self, item: Conversation, text: str, index: int) -> Span:
        if index == 0:
            raise item.row.error("begins with an assistant message, which answers nothing")
        start = self._render(item, item.messages[:index], prompt=True)
        end = text
        if index + 1 < len(item.messages):
            end = self._render(item, item.messages[: index + 1])
        if not (text.startswith(end) and end.startswith(start)):
            raise item.row.error(
                f"the chat template renders messages[{index}] differently in a longer "
                "conversation, so that its tokens cannot be told",
                hint="set `turns: last`, or mark the turns in the template with {% generation %}",
            )
        return len(start), len(end)

    def _without_tail(
        self, text: str, ids: np.ndarray[Any, Any], bounds: np.ndarray[Any, Any], span: Span
    ) -> Span:
        """`span` up to its last special token if only white space follows that."""
        start, end = span
        special = np.isin(ids, self._special) & _inside(bounds, [span])
        if not special.any():
            return span
        behind = int(bounds[special][-1, 1])
        return (start, behind) if not text[behind:end].strip() else span

    @cached_property
    def _special(self) -> list[int]:
        known = self.tokenizer.added_tokens_decoder
        return [index for index, token in known.items() if token.special]

    def _has_markers(self, item: Conversation) -> bool:
        template = self.tokenizer.get_chat_template(None, item.extra.get("tools"))
        return _MARKERS.search(template) is not None

    def _marked(
        self, item: Conversation, text: str, ids: np.ndarray[Any, Any], bounds: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """The template's own mask, cut down to the turns that are trained on."""
        encoded = self.tokenizer.apply_chat_template(
            list(item.messages),
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
            **item.extra,
        )
        marked: np.ndarray[Any, Any] = np.array(encoded["assistant_masks"], dtype=bool)
        everything = self.turns == "all" and item.first == 0
        try:
            turns = _inside(bounds, self._spans(item, text))
        except DataError:
            if not everything:
                raise
            return marked  # nothing to check against: an earlier turn is rendered otherwise now
        missed = turns.any() and not (marked & turns).any()
        if missed or (everything and (marked & ~turns).any()):
            raise item.row.error(
                "the chat template's {% generation %} markers do not mark the assistant's turns",
                hint="correct the template, or remove the markers",
            )
        mask: np.ndarray[Any, Any] = marked & turns
        return mask


def _inside(bounds: np.ndarray[Any, Any], spans: Sequence[Span]) -> np.ndarray[Any, Any]:
    """Which tokens share a character with one of the spans; shape (length,), bool."""
    inside = np.zeros(len(bounds), dtype=bool)
    for start, end in spans:
        inside |= (bounds[:, 0] < end) & (bounds[:, 1] > start)
    return inside
