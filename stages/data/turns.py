"""The turns of a conversation, found in its text, and what the text lacks of them.

A chat template may lay a call out as JSON, as XML or as code, cut thoughts out of a content, or
leave out what it does not know. So a rendering is compared with one of marked messages: a mark is
one character of a private plane of Unicode, put after each thing that is said. Where a rendering
has the mark, it has what was said, in whatever form.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from stages.data.messages import CALLS, REASONING, Conversation, Messages, says_nothing
from stages.data.rendering import Refused, Renderer
from stages.data.tokenize import Span

THOUGHTS = "thoughts"
_ARGUMENTS = "arguments of "
_FIRST, _LAST = 0xF0000, 0x10FFFE
_MARK = re.compile("[\U000f0000-\U0010fffd]")
_THOUGHTS_END = "</think>"
_CUT = re.compile(r"(?:[<\[({]\S*|\w+)\Z")
"""The end of a text in the middle of a tag or of a word."""
_OPENED = re.compile(r"(?:<[^<>|｜]*>\s*)+\Z")
"""A thought that a generation prompt opens at its end, which a text need not have."""
_TELLING = 8
"""Characters of a content that are not in a text by chance."""


@dataclass(frozen=True)
class Mark:
    """A character after something that a message says."""

    character: str
    """A character that the messages do not have, or the digits of a number."""
    message: int
    """Index of the message."""
    said: str
    """The thing, in words: "content", "thoughts", "call 1 ('f')", "arguments of call 1 ('f')"."""


class _Marked:
    """Messages with marks in those with an index in `which`, and their rendering. The messages have
    none of the marks already.

    Several marks of one message may stand after the same thing: it is rendered if one of them is.
    Without `keys` the arguments of calls keep theirs, for templates that ask for one by name, and
    numbers are replaced by others, which are marks.
    """

    def __init__(self, messages: Messages, which: Collection[int], keys: bool) -> None:
        self._keys, self.which = keys, which
        self.text = ""  # set later
        own = set(_MARK.findall(json.dumps(messages, ensure_ascii=False, default=str)))
        self._free = (each for each in map(chr, range(_FIRST, _LAST)) if each not in own)
        self.marks: list[Mark] = []
        self.messages = [dict(message) for message in messages]
        for index, changed in enumerate(self.messages):
            if index not in which:
                continue
            self._index = index
            if changed.get("content"):
                changed["content"] = self._content(changed["content"])
            if changed["role"] == "assistant":
                for key in REASONING:
                    if changed.get(key):
                        changed[key] = self._after(changed[key], THOUGHTS)
                if changed.get("tool_calls"):
                    calls = enumerate(changed["tool_calls"], 1)
                    changed["tool_calls"] = [self._call(call, f"call {n}") for n, call in calls]
                if isinstance(changed.get("function_call"), Mapping):
                    changed["function_call"] = self._call(changed["function_call"], "call")

    def _after(self, text: Any, said: str) -> Any:
        """Return a text with a mark after its last character that is not white space."""
        if not isinstance(text, str) or not text.strip():
            return text
        end = len(text.rstrip())
        return text[:end] + self._mark(said) + text[end:]

    def _mark(self, said: str, *, number: bool = False) -> str:
        character = next(self._free, None)
        if character is None:  # no row says as much
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
        thoughts = self._after(thoughts, THOUGHTS) if thoughts.replace("<think>", "") else ""
        if end and not answer.strip():
            return content if not thoughts else thoughts + end + answer
        return thoughts + end + self._after(answer, "content")

    def _call(self, call: Mapping[str, Any], said: str) -> dict[str, Any]:
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"], said)}
        said = f"{said} ({call.get('name')!r})"
        changed = {**call, "name": self._after(call.get("name"), said)}
        if call.get("arguments"):
            changed["arguments"] = self._value(call["arguments"], _ARGUMENTS + said)
        return changed

    def _value(self, value: Any, said: str) -> Any:
        """Mark the texts within a value and the keys of its objects."""
        if isinstance(value, Mapping):
            keys = [self._after(key, said) if self._keys else key for key in value]
            values = [self._value(child, said) for child in value.values()]
            return dict(zip(keys, values, strict=True))
        if isinstance(value, list):
            return [self._value(child, said) for child in value]
        if type(value) in (int, float) and not self._keys:
            return int(self._mark(said, number=True))
        return self._after(value, said)

    @functools.cached_property
    def ends(self) -> Mapping[Mark, int]:
        """The place after each mark that is in the text."""
        known = {mark.character: mark for mark in self.marks}
        found = [*re.finditer("|".join(known) or "(?!)", self.text)]
        return {known[match.group()]: match.end() for match in reversed(found)}

    def last(self, before: int) -> Mark | None:
        """Return the last mark in the text of the messages with an index below `before`."""
        marks = [mark for mark in self.ends if mark.message < before]
        return max(marks, key=lambda mark: self.ends[mark], default=None)

    def plain(self) -> str:
        """Return the text without the marks."""
        return self.text.translate({ord(mark.character): None for mark in self.marks})

    def missing(self) -> list[tuple[int, str]]:
        """Return what has no mark in the text, with the index of its message."""
        there = {(mark.message, mark.said) for mark in self.ends}
        said = dict.fromkeys((mark.message, mark.said) for mark in self.marks)
        return [each for each in said if each not in there]


@dataclass(frozen=True)
class Turns:
    """Finds the messages of one conversation in the text that its template renders.

    Most templates render the beginning of a conversation as the beginning of its text, and a
    message is what is added to it. Others drop the thoughts of earlier turns, add a block to the
    last turn, or open a thought in the generation prompt that the text does not have. Then a
    message begins where the text parts from the rendering that ends with its generation prompt, and
    ends where it parts from the rendering that ends with the message, both compared from the last
    thing said before.
    """

    rendered: Renderer
    chat: Conversation
    text: str
    special: re.Pattern[str]
    """Matches the special tokens of the tokenizer."""

    def span(self, index: int, *, prompt: bool) -> Span:
        """Return the characters of one message, from the end of its generation prompt if `prompt`;
        else the first message begins with the text. Raises DataError if they cannot be found."""
        found: Span | None
        try:
            start, end = "", self.text
            if index:
                start = self.rendered.text(self.chat, index, prompt=prompt)
            if index + 1 < len(self.chat.messages):
                end = self.rendered.text(self.chat, index + 1)
            if self.text.startswith(end) and end.startswith(start):
                found = len(start), len(end)
            else:
                found = self._by_marks(index, prompt)
        except Refused as refused:
            found = self._by_marks(index, prompt)
            if found is None:
                raise self.rendered.explained(self.chat, refused) from refused
        if found is None:
            raise self.chat.row.error(
                f"the chat template renders messages[{index}] differently in a longer "
                "conversation, so that its tokens cannot be located",
                hint="set `loss: last` or `turns: each`, or mark the turns in the template with "
                "{% generation %}",
            )
        if not prompt or index:
            return found
        # From the end of the generation prompt of an assistant's message that comes first.
        user = [{"role": "user", "content": "x"}]
        with contextlib.suppress(Refused):
            asked = self.rendered.of(self.chat, user)
            asking = self.rendered.of(self.chat, user, prompt=True)
            common = _common(asked, asking)
            opening = asking[common if common == len(asked) else self._complete(asking, common) :]
            for header in (opening, _OPENED.sub("", opening)):
                place = self.text.find(header, 0, found[1])
                if header and place >= 0:
                    return place + len(header), found[1]
        raise self.chat.row.error(
            "begins with an assistant's message, whose beginning cannot be located: the chat "
            "template lays it out differently from its generation prompt",
            hint="set `train: false` in that message, or `loss: last`",
        )

    def lost(self, trained: Collection[int]) -> list[tuple[int, str]]:
        """Return what messages say and the text lacks, each with the index of its message. Thoughts
        count in the messages that are `trained` on: templates drop them elsewhere."""
        whole = None if self._has_every_content() else self._whole
        missing = whole.missing() if whole else []
        if any(what.startswith(_ARGUMENTS) for _, what in missing):
            count = len(self.chat.messages)
            asked_for = self._marked(count, False, range(count), keys=False)
            also = asked_for.missing() if asked_for else []
            missing = [each for each in missing if each in also]
        return [(at, what) for at, what in missing if what != THOUGHTS or at in trained]

    def after(self) -> str:
        """Return what the template renders after the text if another message follows: a tool's
        after a call, a user's after anything else. Empty if it cannot be told."""
        count, whole = len(self.chat.messages), self._whole
        if whole is None:
            return ""
        role = "tool" if any(self.chat.messages[-1].get(key) for key in CALLS) else "user"
        asked = [*self.chat.messages, {"role": role, "content": "."}]
        longer = self._marked(count + 1, False, whole.which, messages=asked)
        anchor = longer.last(count) if longer else None
        if longer is None or anchor is None or anchor not in whole.ends:
            return ""
        rest, tail = longer.text[longer.ends[anchor] :], whole.text[whole.ends[anchor] :]
        return rest[len(tail) :] if rest.startswith(tail) else ""

    def _has_every_content(self) -> bool:
        """Whether messages that have nothing but a content follow one another in the text."""
        place = 0
        for message in self.chat.messages:
            content = message.get("content")
            plain = message["role"] != "tool" and message.keys() == {"role", "content"}
            if not plain or not isinstance(content, str) or _THOUGHTS_END in content:
                return False
            said = content.strip()
            place = self.text.find(said, place)
            if place < 0 or 0 < len(said) < _TELLING:
                return False
            place += len(said)
        return True

    def _by_marks(self, index: int, prompt: bool) -> Span | None:
        whole = self._whole
        if whole is None or whole.plain() != self.text:
            return None  # the template looks at what is marked
        start, end = 0, len(whole.text)
        if index:
            start = self._parting(whole, self._marked(index, prompt, whole.which), index)
        if index + 1 < len(self.chat.messages):
            part = self._marked(index + 1, False, whole.which)
            content = not says_nothing(self.chat.messages[index + 1])
            end = self._parting(whole, part, index + 1, other_end=content)
        said = [place for mark, place in whole.ends.items() if mark.message == index]
        if not all(start < place <= end for place in said) or not 0 <= start <= end:
            return None
        marks = [*whole.ends.values()]
        return start - sum(m <= start for m in marks), end - sum(m <= end for m in marks)

    def _parting(
        self, whole: _Marked, part: _Marked | None, before: int, *, other_end: bool = False
    ) -> int:
        """Return the place in `whole` where it parts from `part`, from the last mark that `part`
        has of the messages before an index; at the end of a token or line, unless it is the end of
        `part`. With `other_end` it is after the token that ends the message in `whole`, if `part`
        ends it otherwise. -1 if the two cannot be compared."""
        anchor = part.last(before) if part else None
        if part is None or (anchor is not None and anchor not in whole.ends):
            return -1
        here, there = (whole.ends[anchor], part.ends[anchor]) if anchor else (0, 0)
        rest = part.text[there:]
        common = _common(rest, whole.text[here:])
        if common < len(rest):
            common = self._complete(rest, common)
            if other_end and self.special.search(rest, common):
                # The token that ends the message: another one follows, which begins the next.
                following = whole.text[here + common :]
                found = self.special.match(following)
                if found and self.special.match(following[found.end() :].lstrip()):
                    common += found.end()
        return here + common

    def _complete(self, text: str, end: int) -> int:
        """Return the end of a beginning of a text, without a token, a tag or a word that is cut."""
        tokens = [match.end() for match in self.special.finditer(text) if match.end() <= end]
        start = max(tokens, default=0)
        return start + len(_CUT.sub("", text[start:end]))

    @functools.cached_property
    def _whole(self) -> _Marked | None:
        """The whole text with marks: in all messages, or in the assistant's where the template
        looks at the others' contents; None if it refuses those."""
        count, first = len(self.chat.messages), None
        for which in (range(count), self.chat.assistant_turns()):
            found = self._marked(count, False, which)
            if found and found.plain() == self.text:
                return found
            first = first or found
        return first

    def _marked(
        self,
        count: int,
        prompt: bool,
        which: Collection[int],
        *,
        messages: Messages | None = None,
        keys: bool = True,
    ) -> _Marked | None:
        """Return the rendering of the first `count` messages with marks; None if it is refused."""
        found = _Marked(messages or self.chat.messages, which, keys)
        try:
            found.text = self.rendered.of(self.chat, found.messages[:count], prompt=prompt)
        except Refused:
            return None
        return found


def _common(one: str, other: str) -> int:
    """Return the number of characters that two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
