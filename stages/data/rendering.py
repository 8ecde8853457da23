"""Conversations rendered by chat templates, which are told a fixed date."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline import DataError, StageError
from stages.data.messages import Conversation
from stages.data.refusals import last_message, refusal
from stages.data.template_limits import Limited, TemplateLimitError

_DIRECTIVES = "aAbBcCdDeFgGhHIjmMnpRStTuUVwWxXyYzZ"
_UNPADDED = "deHIjmMSUWy"
"""Directives with a form without leading zeros, written `%-d`."""


@functools.lru_cache(maxsize=8)
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


class Refused(Exception):
    """A template does not lay out some messages; its cause is the template's own error."""

    def __init__(self, messages: Sequence[Any], prompt: bool) -> None:
        super().__init__()
        self.messages, self.prompt = messages, prompt


class Renderer:
    """Renders the first messages of conversations. Many are rendered at once ahead of their use."""

    def __init__(self, tokenizer: Any, today: str) -> None:
        self._tokenizer, self._today = tokenizer, today
        self._apply = Limited(tokenizer.apply_chat_template, tokenizer.name_or_path)
        self._broken: StageError | None = None
        self._ahead: dict[tuple[int, int, bool], tuple[Conversation, str]] = {}

    def template(self, chat: Conversation) -> str:
        """Return the template for a conversation. Raises DataError if there is none."""
        if not self._tokenizer.chat_template:
            raise chat.row.error(
                "the model's tokenizer has no chat template",
                hint="use an instruction-tuned model, name a template in `chat_template` in the "
                "model's slot, or set `template: false` for pairs of texts",
            )
        return str(self._tokenizer.get_chat_template(None, chat.extra.get("tools")))

    def apply(self, chat: Conversation, messages: Sequence[Any], **arguments: Any) -> Any:
        """Call the tokenizer's `apply_chat_template` for messages of a conversation."""
        if self._broken is not None:
            raise self._broken
        return self._apply(
            list(messages),
            chat_template=with_date(self.template(chat), self._today),
            **arguments,
            **chat.extra,
        )

    def ahead(self, parts: Iterable[tuple[Conversation, int, bool]]) -> None:
        """Render parts of conversations, as `text` is asked for them, together: that saves much of
        the time. Where the template refuses one, all of its kind are left to `text`: whole
        conversations, beginnings, or those with a generation prompt, with the same arguments.
        Forgets what was rendered before."""
        self._ahead.clear()
        kinds = defaultdict(list)
        for chat, count, prompt in parts:
            kind = prompt, count == len(chat.messages), repr(chat.extra)
            kinds[kind].append((chat, count))
        for (prompt, *_), these in kinds.items():
            messages = [chat.messages[:count] for chat, count in these]
            with contextlib.suppress(Exception):  # which `text` explains
                texts = self.apply(
                    these[0][0], messages, tokenize=False, add_generation_prompt=prompt
                )
                for (chat, count), text in zip(these, texts, strict=True):
                    self._ahead[id(chat), count, prompt] = chat, str(text)

    def text(self, chat: Conversation, count: int, *, prompt: bool = False) -> str:
        """Return the text of the first `count` messages, with a generation prompt behind them if
        `prompt`. Raises Refused if the template does not lay them out."""
        known = self._ahead.get((id(chat), count, prompt))
        if known is not None:
            return known[1]
        return self.of(chat, chat.messages[:count], prompt=prompt)

    def of(self, chat: Conversation, messages: Sequence[Any], *, prompt: bool = False) -> str:
        """Return the text of some messages, rendered with the conversation's arguments. Raises
        Refused if the template does not lay them out, and StageError once it has taken more time or
        memory than it may: other rows, and other forms of this one, would take as much."""
        try:
            text = self.apply(chat, messages, tokenize=False, add_generation_prompt=prompt)
        except TemplateLimitError as error:
            self._broken = StageError(f"{chat.row.file}:{chat.row.number}: {error}")
            raise self._broken from error
        except StageError:
            raise
        except Exception as error:  # a template is a program of its own and may raise anything
            raise Refused(messages, prompt) from error
        return str(text)

    def explained(self, chat: Conversation, *refused: Refused) -> DataError:
        """Return what a template refuses of a conversation, for people: of the first of its forms
        of which it takes the most messages."""
        renders = functools.partial(self._renders, chat, refused[0].prompt)
        furthest = max(refused, key=lambda each: last_message(each.messages, chat.extra, renders))
        error = furthest.__cause__
        assert isinstance(error, Exception)
        return chat.row.error(refusal(furthest.messages, chat.extra, error, renders))

    def _renders(
        self,
        chat: Conversation,
        prompt: bool,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
    ) -> bool:
        """Whether the template takes other messages and arguments than a conversation's."""
        other = dataclasses.replace(chat, extra=extra)
        with contextlib.suppress(Exception):
            self.apply(other, messages, tokenize=False, add_generation_prompt=prompt)
            return True
        return False
