"""Marks in what the messages of a conversation say, so that it is found in their rendering.

A chat template may lay a call out as JSON, as XML or as code, cut thoughts out of a content, or
leave out what it does not know. A mark is one character of a private plane of Unicode, put after
each thing that is said: where a rendering has the mark, it has what was said, in whatever form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's thoughts, by the templates that read them."""
CALLS = ("tool_calls", "function_call")
THOUGHTS = "thoughts"
ARGUMENTS = "arguments of "
_FIRST, _LAST = 0xF0000, 0x10FFFE
_MARK = re.compile("[\U000f0000-\U0010fffd]")
_THOUGHTS_END = "</think>"


@dataclass(frozen=True)
class Mark:
    """A character after something that a message says."""

    character: str
    """A character that the messages do not have, or the digits of a number."""
    message: int
    """Index of the message."""
    said: str
    """The thing, in words: "content", "thoughts", "call 1 ('f')", "arguments of call 1 ('f')"."""


def marked(
    messages: Sequence[Mapping[str, Any]], which: Collection[int], *, keys: bool = True
) -> tuple[list[dict[str, Any]], list[Mark]]:
    """Return messages with marks in those with an index in `which`, and the marks. Several marks of
    one message may stand after the same thing: it is rendered if one of them is. Without `keys` the
    arguments of calls keep theirs, for templates that ask for one by name, and numbers are replaced
    by others, which are marks."""
    marking = _Marking(messages, keys)
    copies = [
        marking.message(index, message) if index in which else dict(message)
        for index, message in enumerate(messages)
    ]
    return copies, marking.marks


def without_marks(text: str, marks: Sequence[Mark]) -> str:
    """Return a marked text as it would be without the marks."""
    return text.translate({ord(mark.character): None for mark in marks})


def says_nothing(message: Mapping[str, Any]) -> bool:
    """Whether a message has neither content, as text or in parts, nor calls nor thoughts."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    texts += [_text_of(message.get(key)) for key in (*CALLS, *REASONING)]
    return not any(text.strip() for text in texts)


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else repr(value) if value else ""


class _Marking:
    """Marks that are given out one after another, none of which the messages have already."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], keys: bool) -> None:
        self._keys = keys
        own = set(_MARK.findall(json.dumps(messages, ensure_ascii=False, default=str)))
        self._free = (each for each in map(chr, range(_FIRST, _LAST)) if each not in own)
        self.marks: list[Mark] = []

    def message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        copy = dict(message)
        self._index = index
        if message.get("content"):
            copy["content"] = self._content(message["content"])
        if message["role"] == "assistant":
            for key in REASONING:
                if _text_of(message.get(key)).strip():
                    copy[key] = self._behind(message[key], THOUGHTS)
            if message.get("tool_calls"):
                calls = enumerate(message["tool_calls"], 1)
                copy["tool_calls"] = [self._call(call, f"call {number}") for number, call in calls]
            if isinstance(message.get("function_call"), Mapping):
                copy["function_call"] = self._call(message["function_call"], "call")
        return copy

    def _behind(self, text: Any, said: str) -> Any:
        """Return a text with a mark behind its last character that is no white space."""
        if not isinstance(text, str) or not text.strip():
            return text
        end = len(text.rstrip())
        return text[:end] + self._mark(said) + text[end:]

    def _mark(self, said: str, *, number: bool = False) -> str:
        character = next(self._free, None)
        if character is None:  # of more than any row says
            return "0" if number else ""
        mark = Mark(str(ord(character) ** 2) if number else character, self._index, said)
        self.marks.append(mark)
        return mark.character

    def _content(self, content: Any) -> Any:
        """Mark a text, and the thoughts that it may begin with; a list of parts by its last one."""
        if not isinstance(content, str):
            *before, last = content
            return [*before, {**last, "text": self._content(last["text"])}]
        thoughts, end, answer = content.rpartition(_THOUGHTS_END)
        thoughts = self._behind(thoughts, THOUGHTS) if thoughts.replace("<think>", "") else ""
        if end and not answer.strip():
            return content if not thoughts else thoughts + end + answer
        return thoughts + end + self._behind(answer, "content")

    def _call(self, call: Mapping[str, Any], said: str) -> dict[str, Any]:
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"], said)}
        said = f"{said} ({call.get('name')!r})"
        copy = {**call, "name": self._behind(call.get("name"), said)}
        if call.get("arguments"):
            copy["arguments"] = self._value(call["arguments"], ARGUMENTS + said)
        return copy

    def _value(self, value: Any, said: str) -> Any:
        """Mark the texts within a value and the keys of its objects."""
        if isinstance(value, Mapping):
            keys = [self._behind(key, said) if self._keys else key for key in value]
            values = [self._value(child, said) for child in value.values()]
            return dict(zip(keys, values, strict=True))
        if isinstance(value, list):
            return [self._value(child, said) for child in value]
        if type(value) in (int, float) and not self._keys:
            return int(self._mark(said, number=True))
        return self._behind(value, said)
