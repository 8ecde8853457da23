"""Conversations rendered by chat templates, which are told a fixed date: in each form that says the
same; and why one is refused, found by rendering it with one thing changed."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import DataError, StageError
from stages.data.messages import CALLS, REASONING, Conversation, Messages
from stages.template_limits import Limited, TemplateLimitError

_DIRECTIVES = "aAbBcCdDeFgGhHIjmMnpRStTuUVwWxXyYzZ"
_UNPADDED = "deHIjmMSUWy"
"""Directives with a form without leading zeros, written `%-d`."""
_AHEAD = 1 << 24
"""Characters of messages that are rendered ahead at most, each in as many parts as it is in."""
_WORDS = 300
"""Characters of the template's own words that are shown."""


@functools.lru_cache(maxsize=8)
def with_date(template: str, date: str) -> str:
    """Return a chat template whose `strftime_now` formats midnight of `date` (YYYY-MM-DD). It is
    replaced by a macro, since templates cannot be given functions, and a macro takes precedence
    over transformers' own function."""
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


def layouts(messages: Messages) -> Iterator[Messages]:
    """Yield the messages as they are, and in each other form that says the same. Templates take the
    arguments of calls as objects or as JSON text, a call without a content or with null or an empty
    text for it, thoughts under one of several keys, and contents as text or as lists of parts."""
    yield messages
    calls = [any(message.get(key) for key in CALLS) for message in messages]
    silent = [has and not each.get("content") for has, each in zip(calls, messages, strict=True)]
    empties = ({}, {"content": ""}, {"content": None}) if any(silent) else ({},)
    for as_text, empty in itertools.product((False, True) if any(calls) else (), empties):
        if as_text or empty:
            filled = [
                {**message, **(empty if is_silent else {})}
                for message, is_silent in zip(messages, silent, strict=True)
            ]
            yield [_with_text_arguments(message) for message in filled] if as_text else filled
    thoughts = [next(filter(message.get, REASONING), None) for message in messages]
    for key in REASONING if any(thoughts) else ():
        yield [
            {key if name == given else name: value for name, value in message.items()}
            for message, given in zip(messages, thoughts, strict=True)
        ]
    texts = [message.get("content") or "" for message in messages]
    yield [
        {**message, "content": [{"type": "text", "text": text}]} if type(text) is str else message
        for message, text in zip(messages, texts, strict=True)
    ]


def _with_text_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message, or a call, with the arguments of its calls as JSON text."""
    changed = dict(given)
    if given.get("tool_calls"):
        changed["tool_calls"] = [_with_text_arguments(call) for call in given["tool_calls"]]
    for key in ("function_call", "function"):
        if isinstance(given.get(key), Mapping):
            changed[key] = _with_text_arguments(given[key])
    if isinstance(given.get("arguments"), Mapping):
        changed["arguments"] = json.dumps(given["arguments"], ensure_ascii=False)
    return changed


def prints_python(messages: Messages, text: str) -> bool:
    """Whether a rendering shows the arguments of a call as Python prints a dict, not as JSON."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    given = [(call.get("function") or call).get("arguments") for call in calls]
    return any(repr(each) in text for each in given if isinstance(each, dict) and each)


@dataclass(eq=False)
class Refused(Exception):
    """A template does not lay out some messages; its cause is the template's own error."""

    messages: Messages
    prompt: bool


class Renderer:
    """Renders the first messages of conversations. Many are rendered at once ahead of their use."""

    def __init__(self, tokenizer: Any, today: str) -> None:
        self._tokenizer, self._today = tokenizer, today
        self._apply = Limited(tokenizer.apply_chat_template, tokenizer.name_or_path)
        self._broken: StageError | None = None

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
        template = with_date(self.template(chat), self._today)
        return self._apply(list(messages), chat_template=template, **arguments, **chat.extra)

    def ahead(
        self,
        chats: Iterable[Conversation],
        located: Callable[[Conversation], list[tuple[int, bool]]],
    ) -> None:
        """Render conversations whole, up to each of the messages that are `located` (after a
        generation prompt or not), and with it: in few calls, which saves much of the time. Where
        the template refuses one, all of its kind are left to `text`: whole conversations,
        beginnings, or those with a generation prompt, with the same arguments."""
        left, kinds = _AHEAD, defaultdict[Any, list[tuple[Conversation, int]]](list)
        for chat in chats:
            whole = len(chat.messages)
            parts = [(whole, False)]
            with contextlib.suppress(Exception):  # there may be no template for these tools
                for index, prompt in located(chat):
                    parts += [(index, prompt)] if index else []
                    parts += [(index + 1, False)] if index + 1 < whole else []
            left -= len(parts) * sum(len(str(each.get("content"))) for each in chat.messages)
            if left < 0:
                break
            for count, prompt in parts:
                kinds[prompt, count == whole, repr(chat.extra)].append((chat, count))
        for (prompt, *_), these in kinds.items():
            messages = [chat.messages[:count] for chat, count in these]
            with contextlib.suppress(Exception):  # which `text` explains
                texts = self.apply(
                    these[0][0], messages, tokenize=False, add_generation_prompt=prompt
                )
                for (chat, count), text in zip(these, texts, strict=True):
                    chat.rendered[count, prompt] = str(text)

    def text(self, chat: Conversation, count: int, *, prompt: bool = False) -> str:
        """Return the text of the first messages, and of a generation prompt if `prompt`."""
        known = chat.rendered.get((count, prompt))
        return self.of(chat, chat.messages[:count], prompt=prompt) if known is None else known

    def of(self, chat: Conversation, messages: Messages, *, prompt: bool = False) -> str:
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
        except Exception as error:  # a template is a program and may raise anything
            raise Refused(messages, prompt) from error
        return str(text)

    def explained(self, chat: Conversation, *refused: Refused) -> DataError:
        """Return what a template refuses of a conversation, for people: of the form whose messages
        it takes most of."""

        def renders(messages: Messages, extra: Mapping[str, Any] = chat.extra) -> bool:
            other = dataclasses.replace(chat, extra=extra)
            with contextlib.suppress(Exception):
                self.apply(other, messages, tokenize=False, add_generation_prompt=refused[0].prompt)
                return True
            return False

        def end(messages: Messages) -> int:
            """Return a number of messages that it refuses while it takes one less, or all."""
            counts = range(1, len(messages))
            return 1 + bisect.bisect_left(counts, 1, key=lambda n: not renders(messages[:n]))

        furthest = max(refused, key=lambda each: end(each.messages))
        messages, error = furthest.messages, furthest.__cause__
        words = " ".join(str(error).split())[:_WORDS] or type(error).__name__
        for key in chat.extra:
            rest = {name: value for name, value in chat.extra.items() if name != key}
            if renders(messages, rest):
                said = f"the row has `{key}`"
                break
        else:
            last = end(messages) - 1
            before, changes = messages[:last], _changes(messages[: last + 1])
            found = (what for what, instead in changes if renders([*before, *instead]))
            what, where = next(found, None), f"messages[{last}]"
            if what is None:
                role = f"whose role is {messages[last]['role']!r}"
                return chat.row.error(f"the chat template refuses {where}, {role}: {words}")
            said = f"{where} {what}"
        return chat.row.error(f"{said}, which the chat template does not lay out: {words}")


def _changes(messages: Messages) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield what the last of some messages may be refused for, and messages without that."""
    last = dict(messages[-1])
    role, calls = last["role"], last.get("tool_calls")
    filled = {**last, "content": "x"}
    if "content" not in last:
        yield "has tool calls and no content" if calls else "has no content", [filled]
    elif not last["content"]:
        yield "has an empty content", [filled]
    if calls:
        as_text = [_with_text_arguments(call) for call in calls]
        yield "has tool calls with arguments as an object", [{**last, "tool_calls": as_text}]
        if len(calls) > 1:
            yield "has several tool calls", [{**last, "tool_calls": calls[:1]}]
        yield "has tool calls", [{k: value for k, value in filled.items() if k != "tool_calls"}]
    for key in last.keys() - {"role", "content", "tool_calls"}:
        yield f"has `{key}`", [{name: each for name, each in last.items() if name != key}]
    user = {"role": "user", "content": "x"}
    if len(messages) == 1 and role != "user":
        yield f"is of role {role!r} and the first", [user, last]
    before = messages[-2]["role"] if len(messages) > 1 else None
    other = "assistant" if before == "user" else "user"
    if before is not None and role != other:
        between = {"role": other, "content": "x"}
        yield f"is of role {role!r} after one of role {before!r}", [between, last]
    yield f"is of role {role!r}", []
    yield f"is of role {role!r}", [{**user, "content": last.get("content") or "x"}]
