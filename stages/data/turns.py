"""The turns of a conversation, found in its text, and what the text lacks of them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stages.data.encodings import Span
from stages.data.layouts import Messages
from stages.data.marks import ARGUMENTS, CALLS, THOUGHTS, Mark, marked, says_nothing, without_marks
from stages.data.messages import Conversation
from stages.data.rendering import Refused, Renderer

_PLAIN = {"role", "content"}
_CUT = re.compile(r"(?:[<\[({]\S*|\w+)\Z")
"""The end of a text in the middle of a tag or of a word."""
_OPENED = re.compile(r"(?:<[^<>|｜]*>\s*)+\Z")
"""A thought that a generation prompt opens at its end, which a text need not have."""
_TELLING = 8
"""Characters of a content that are not in a text by chance."""


@dataclass(frozen=True)
class MarkedText:
    """A rendering of messages some of which have marks."""

    text: str
    marks: Sequence[Mark]
    which: Collection[int]
    """Indices of the messages with marks."""

    @functools.cached_property
    def ends(self) -> Mapping[Mark, int]:
        """The place after each mark that is in the text."""
        known = {mark.character: mark for mark in self.marks}
        found = re.finditer("|".join(known) or "(?!)", self.text)
        places: dict[Mark, int] = {}
        for match in found:
            places.setdefault(known[match.group()], match.end())
        return places

    def last(self, before: int) -> Mark | None:
        """Return the last mark in the text of the messages with an index below `before`."""
        marks = [mark for mark in self.ends if mark.message < before]
        return max(marks, key=lambda mark: self.ends[mark], default=None)


@dataclass(frozen=True)
class Turns:
    """Finds the messages of one conversation in the text that its template renders.

    Most templates render the beginning of a conversation as the beginning of its text, and a
    message is what comes to it. Others drop the thoughts of earlier turns, add a block to the last
    turn, or open a thought in the generation prompt that the text does not have. Then a message
    begins where the text parts from the rendering that ends with its generation prompt, and ends
    where it parts from the rendering that ends with the message, both compared from the last thing
    said before.
    """

    rendered: Renderer
    chat: Conversation
    text: str
    special: re.Pattern[str]
    """Matches the special tokens of the tokenizer."""

    def span(self, index: int, *, prompt: bool) -> Span:
        """Return the characters of one message, from the end of its generation prompt if `prompt`;
        else the first message begins with the text. Raises DataError if they cannot be found."""
        try:
            found = self._by_prefix(index, prompt) or self._by_marks(index, prompt)
        except Refused as refused:
            found = self._by_marks(index, prompt)
            if found is None:
                raise self.rendered.explained(self.chat, refused) from refused
        if found is not None and prompt and not index:
            found = self._opening(found[1]), found[1]
        if found is None:
            raise self.chat.row.error(
                f"the chat template renders messages[{index}] differently in a longer "
                "conversation, so that its tokens cannot be located",
                hint="set `loss: last` or `turns: each`, or mark the turns in the template with "
                "{% generation %}",
            )
        return found

    def lost(self, trained: Collection[int]) -> list[tuple[int, str]]:
        """Return what messages say and the text lacks, each with the index of its message. Thoughts
        count in the messages that are `trained` on: templates drop those of others."""
        if self._has_every_content():
            return []
        missing = _missing(self._whole)
        if any(what.startswith(ARGUMENTS) for _, what in missing):
            count = len(self.chat.messages)
            asked_for = _missing(self._marked(count, False, range(count), keys=False))
            missing = [each for each in missing if each in asked_for]
        return [(at, what) for at, what in missing if what != THOUGHTS or at in trained]

    def after(self) -> str:
        """Return what the template renders after the text if another message follows: a tool's
        after a call, a user's after anything else. Empty if it cannot be told."""
        role = "tool" if any(self.chat.messages[-1].get(key) for key in CALLS) else "user"
        asked = [*self.chat.messages, {"role": role, "content": "."}]
        whole, longer = self._whole, None
        if whole is not None:
            longer = self._marked(len(asked), False, whole.which, chat=asked)
        anchor = longer.last(len(self.chat.messages)) if longer else None
        if whole is None or longer is None or anchor is None or anchor not in whole.ends:
            return ""
        rest, tail = longer.text[longer.ends[anchor] :], whole.text[whole.ends[anchor] :]
        return rest[len(tail) :] if rest.startswith(tail) else ""

    def _has_every_content(self) -> bool:
        """Whether messages that have nothing but a content follow one another in the text."""
        place = 0
        for message in self.chat.messages:
            content = message.get("content")
            plain = message["role"] != "tool" and message.keys() == _PLAIN
            if not plain or not isinstance(content, str) or "</think>" in content:
                return False
            said = content.strip()
            place = self.text.find(said, place)
            if place < 0 or 0 < len(said) < _TELLING:
                return False
            place += len(said)
        return True

    def _opening(self, end: int) -> int:
        """Return the end of the generation prompt of an assistant's message that opens the
        conversation, as it follows a user's. Raises DataError if it cannot be found."""
        user = [{"role": "user", "content": "x"}]
        with contextlib.suppress(Refused):
            asked = self.rendered.of(self.chat, user)
            asking = self.rendered.of(self.chat, user, prompt=True)
            common = _common(asked, asking)
            common = common if common == len(asked) else self._complete(asking, common)
            prompt = asking[common:]
            for header in (prompt, _OPENED.sub("", prompt)):
                place = self.text.find(header, 0, end)
                if header and place >= 0:
                    return place + len(header)
        raise self.chat.row.error(
            "begins with an assistant's message, whose beginning cannot be located: the chat "
            "template lays it out differently from its generation prompt",
            hint="set `train: false` in that message, or `loss: last`",
        )

    def _by_prefix(self, index: int, prompt: bool) -> Span | None:
        start, end = "", self.text
        if index:
            start = self.rendered.text(self.chat, index, prompt=prompt)
        if index + 1 < len(self.chat.messages):
            end = self.rendered.text(self.chat, index + 1)
        if self.text.startswith(end) and end.startswith(start):
            return len(start), len(end)
        return None

    def _by_marks(self, index: int, prompt: bool) -> Span | None:
        whole = self._whole
        if whole is None or without_marks(whole.text, whole.marks) != self.text:
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
        return self._unmarked(whole, start), self._unmarked(whole, end)

    def _parting(
        self, whole: MarkedText, part: MarkedText | None, before: int, *, other_end: bool = False
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
        common = _common(rest, whole.text[here : here + len(rest)])
        if common < len(rest):
            common = self._complete(rest, common)
            if other_end and self.special.search(rest, common):
                common += self._end_token(whole.text[here + common :])
        return here + common

    def _end_token(self, text: str) -> int:
        """Return the length of the token at the beginning of a text that ends a message: another
        one follows, which begins the next. 0 if there is none."""
        found = self.special.match(text)
        return found.end() if found and self.special.match(text[found.end() :].lstrip()) else 0

    def _complete(self, text: str, end: int) -> int:
        """Return the end of a beginning of a text, without a token, a tag or a word that is cut."""
        tokens = [match.end() for match in self.special.finditer(text) if match.end() <= end]
        start = max(tokens, default=0)
        return start + len(_CUT.sub("", text[start:end]))

    @functools.cached_property
    def _whole(self) -> MarkedText | None:
        """The whole text with marks: in all messages, or in the assistant's where the template
        looks at the others' contents; None if it refuses those."""
        count, first = len(self.chat.messages), None
        for which in (range(count), self.chat.assistant_turns()):
            found = self._marked(count, False, which)
            if found and without_marks(found.text, found.marks) == self.text:
                return found
            first = first or found
        return first

    def _marked(
        self,
        count: int,
        prompt: bool,
        which: Collection[int],
        *,
        chat: Messages | None = None,
        keys: bool = True,
    ) -> MarkedText | None:
        messages, marks = marked(chat or self.chat.messages, which, keys=keys)
        try:
            text = self.rendered.of(self.chat, messages[:count], prompt=prompt)
        except Refused:
            return None
        return MarkedText(text, marks, which)

    def _unmarked(self, whole: MarkedText, place: int) -> int:
        """Return a place of the marked text in the text without marks."""
        return place - sum(end <= place for end in whole.ends.values())


def _common(one: str, other: str) -> int:
    """Return the number of characters that two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _missing(found: MarkedText | None) -> list[tuple[int, str]]:
    """Return what has no mark in a text, with the index of its message."""
    if found is None:
        return []
    there = {(mark.message, mark.said) for mark in found.ends}
    said = dict.fromkeys((mark.message, mark.said) for mark in found.marks)
    return [each for each in said if each not in there]
