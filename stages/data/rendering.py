"""Conversations rendered by chat templates, which are told a fixed date; and why one is refused,
found by rendering it with one thing changed."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeline import DataError, StageError
from stages.data.layouts import with_text_arguments
from stages.data.messages import Conversation
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


Renders = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], bool]
"""Whether the template lays out these messages with these further arguments."""
_WORDS = 300
"""Characters of the template's own words that are shown."""


def refusal(
    given: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
    error: Exception,
    renders: Renders,
) -> str:
    """Return what the template refuses of some messages with their further arguments, and its own
    words for it."""
    words = " ".join(str(error).split())[:_WORDS] or type(error).__name__
    messages = list(given)
    for key in extra:
        rest = {name: value for name, value in extra.items() if name != key}
        if renders(messages, rest):
            return f"the row has `{key}`, which the chat template does not lay out: {words}"
    last = last_message(messages, extra, renders)
    before, changes = messages[: last - 1], _changes(messages[:last])
    found = (what for what, instead in changes if renders([*before, *instead], extra))
    what = next(found, None)
    where = f"messages[{last - 1}]"
    if what is None:
        role = messages[last - 1]["role"] if messages else "none"
        return f"the chat template refuses {where}, whose role is {role!r}: {words}"
    return f"{where} {what}, which the chat template does not lay out: {words}"


def last_message(
    messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any], renders: Renders
) -> int:
    """Return a number of messages that the template refuses while it takes one less, or refuses
    all."""
    taken, refused = 0, len(messages)
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if renders(messages[:middle], extra):
            taken = middle
        else:
            refused = middle
    return refused


def _changes(
    messages: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield what the last of some messages may be refused for, and messages without that."""
    if not messages:
        return
    last = dict(messages[-1])
    role, calls = last["role"], last.get("tool_calls")
    before = messages[-2]["role"] if len(messages) > 1 else None
    filled = {**last, "content": "x"}
    if "content" not in last:
        yield "has tool calls and no content" if calls else "has no content", [filled]
    elif not last["content"]:
        yield "has an empty content", [filled]
    if calls:
        plain = {key: value for key, value in filled.items() if key != "tool_calls"}
        as_text = [with_text_arguments(call) for call in calls]
        yield "has tool calls with arguments as an object", [{**last, "tool_calls": as_text}]
        if len(calls) > 1:
            yield "has several tool calls", [{**last, "tool_calls": calls[:1]}]
        yield "has tool calls", [plain]
    for key in last.keys() - {"role", "content", "tool_calls"}:
        yield f"has `{key}`", [{name: each for name, each in last.items() if name != key}]
    if before is None and role != "user":
        user = {"role": "user", "content": "x"}
        yield f"is of role {role!r} and the first", [user, last]
    other = "assistant" if before == "user" else "user"
    if before is not None and role != other:
        between = {"role": other, "content": "x"}
        yield f"is of role {role!r} after one of role {before!r}", [between, last]
    yield f"is of role {role!r}", []
    yield f"is of role {role!r}", [{"role": "user", "content": last.get("content") or "x"}]
