"""YAML text -> nodes with line and column, under tight limits.

Built from PyYAML's events instead of its composer, which expands aliases without a limit and drops
what the limits have to look at. Refused: tags of any kind, a second document, merge keys (`<<`),
recursive aliases, more than MAX_DEPTH levels, more than MAX_VALUES values once aliases are
expanded. Nothing is ever constructed but text, numbers, booleans, null, lists and mappings.

Unquoted scalars follow YAML 1.2's core schema, without what surprises people: `true`, `null`, `-8`
and `1e-4` mean what they look like, and everything else is text: `no`, `12:30`, `007`, `0x10`,
`1_000`, `2024-01-01`, `.inf`. A field that wants no text then refuses it and says what to write
instead, so nothing changes its meaning silently.

Text that starts with `./` or `../` is a path relative to the file it is written in (on the command
line: to the current folder) and becomes absolute here, before files are merged. This holds for any
value, whatever its field; write other text that begins so without the dot."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from pipeline.errors import Location, Problem
from pipeline.recipe.nodes import Node, Scalar

MAX_DEPTH = 64
MAX_VALUES = 10_000
WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}
INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,39})")
# with a dot or an exponent: a whole number too long for INT stays text, not rounded
FLOAT = re.compile(
    r"(?=.*[.eE])[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
)

BLANKS = {"\t": "a tab", "\u00a0": "a no-break space"}
CLOSING = {"[": "]", "{": "}"}
BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
KEY = re.compile(r"(?P<indent>\s*(?:- )?)(?P<key>[\w.-]+)\s*(?P<mark>:(?=\S)|=)\s*(?P<value>.*)")

Locate = Callable[[int, int], Location]
"""(zero-based line, zero-based column) -> place."""


def scalar(text: str) -> Scalar:
    """The value of an unquoted scalar."""
    if text in WORDS:
        return WORDS[text]
    if INT.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return text


def parse(text: str, *, locate: Locate, folder: Path) -> tuple[Node | None, list[Problem]]:
    """The root node and every mistake found. The node is None for an empty text and when the text
    is not YAML at all (then there is a problem)."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = locate(before.count("\n"), error.position - before.rfind("\n") - 1)
        message = f"the character U+{ord(text[error.position]):04X} is not allowed"
        return None, [Problem(message=message, location=place)]
    parser = _Parser(loader, locate, folder)
    try:
        parser.read()
    except yaml.MarkedYAMLError as error:
        mistake = next(_mistakes(error, text))
        parser.say(locate(mistake.line, mistake.column), mistake.message, mistake.hint)
    except (ValueError, OverflowError):
        # PyYAML lets chr() and int() fail on absurd escapes and version numbers
        place = locate(loader.line, loader.column)
        parser.say(place, "this is not a character or number that exists")
    except _StopError:  # its problem is noted
        pass
    return parser.root, parser.problems


class _StopError(Exception):
    """The rest of the text is not worth reading; the problem is already noted."""


class _Built(NamedTuple):
    """A finished node, with what only the parser needs to know of it."""

    node: Node
    size: int = 1
    """Values in it with aliases expanded."""
    text: str | None = None
    """A scalar as written; None for lists and mappings."""
    bare: bool = False
    """Whether that is without quotes."""


class _Parser:
    def __init__(self, loader: yaml.SafeLoader, locate: Locate, folder: Path) -> None:
        self._loader, self._locate, self._folder = loader, locate, folder
        self._next: Callable[[], Any] = loader.get_event
        self._anchors: dict[str, _Built | None] = {}
        """None for a list or mapping whose end has not come yet."""
        self.root: Node | None = None
        self.problems: list[Problem] = []

    def read(self) -> None:
        while self._loader.check_event():
            event = self._next()
            if isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
                self._stop(event, "a second document starts here", "one file, one recipe")
            if isinstance(event, yaml.NodeEvent):
                self.root = self._node(event, 0).node

    def say(self, place: Location, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message=message, hint=hint, location=place))

    def _place(self, event: Any) -> Location:
        return self._locate(event.start_mark.line, event.start_mark.column)

    def _stop(self, event: Any, message: str, hint: str = "") -> NoReturn:
        self.say(self._place(event), message, hint)
        raise _StopError

    def _node(self, event: Any, depth: int) -> _Built:
        """The node that begins with an event; its other events are read."""
        if getattr(event, "tag", None) is not None:
            hint = "a recipe holds only text, numbers, true, false, null, lists and mappings"
            self.say(self._place(event), f"tags such as `{event.tag}` are not allowed", hint)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                hint = f'put quotes around text that begins with *: "*{event.anchor}"'
                self._stop(event, f"nothing is anchored as `&{event.anchor}` above", hint)
            whole = self._anchors[event.anchor]
            return whole or self._stop(event, f"`*{event.anchor}` contains itself")
        if isinstance(event, yaml.ScalarEvent):
            bare = event.style is None
            node = Node(value=self._value(event, bare=bare), at=self._place(event))
            built = _Built(node, text=event.value, bare=bare)
        else:
            built = self._collection(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = built
        return built

    def _value(self, event: Any, *, bare: bool) -> Scalar:
        value = scalar(event.value) if bare else event.value
        if not isinstance(value, str):
            return value
        if bare and value == "None":
            self.say(self._place(event), "`None` is text in YAML", "write null")
        if re.search("[\ud800-\udfff]", value):
            self.say(self._place(event), "half a surrogate pair is not a character")
            return ""
        if re.fullmatch(r"\\*\?\?\?", value):
            hint = "give one, or leave the key out"
            self.say(self._place(event), "`???` stands for no value here", hint)
        if value.startswith(("./", "../")):
            # abspath, not resolve: a link keeps the name that the person gave it
            return os.path.abspath(self._folder / value)  # noqa: PTH100
        return value

    def _collection(self, event: Any, depth: int) -> _Built:
        if depth >= MAX_DEPTH:
            self._stop(event, f"nested deeper than {MAX_DEPTH} levels")
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        items: list[Node] = []
        size, mapping = 1, Node(value={}, at=self._place(event))
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        while not isinstance(first := self._next(), yaml.CollectionEndEvent):
            entry = self._node(first, depth + 1)
            value = self._node(self._next(), depth + 1) if is_mapping else entry
            size += value.size
            if size > MAX_VALUES:
                self._stop(event, f"holds more than {MAX_VALUES} values", "aliases count in full")
            if is_mapping:
                self._entry(mapping, entry, value.node)
            else:
                items.append(value.node)
        return _Built(mapping if is_mapping else Node(value=items, at=mapping.at), size)

    def _entry(self, mapping: Node, key: _Built, value: Node) -> None:
        """Add an entry to a mapping."""
        entries, text, place = mapping.entries(), key.text, key.node.at
        if not text:
            # two braces open a mapping in a mapping: the value as a whole is meant as text
            place = mapping.at if isinstance(key.node.value, dict) else place
            self.say(place, "a key must be text", "put quotes around text with { or [")
        elif text == "<<" and key.bare:
            self.say(place, "merge keys (`<<`) are not allowed", "use `extends`")
        elif text in entries:
            line = mapping.keys[text].line
            self.say(place, f"`{text}` is given twice", f"first on line {line}" if line else "")
        else:
            entries[text], mapping.keys[text] = value, place


class Mistake(NamedTuple):
    """A mistake in a text; line and column count from zero."""

    line: int
    column: int
    message: str
    hint: str = ""


def _mistakes(error: yaml.MarkedYAMLError, text: str) -> Iterator[Mistake]:
    """Yield what may be wrong with the text, the likeliest first. PyYAML names its own states, and
    notices many mistakes lines after they were made. The place is the one to change: where a quote
    or bracket opens, the line whose colon is missing."""
    lines = BREAK.split(text.replace("\ufeff", ""))  # as PyYAML counts lines and columns
    start, mark, context = error.context_mark, error.problem_mark, error.context or ""
    line, column = (at.line, at.column) if (at := mark or start) is not None else (0, 0)
    what = " ".join((error.problem or "cannot be read").split())
    for number in (line, line - 1):
        blanks = lines[number][: _indent(lines[number])] if 0 <= number < len(lines) else ""
        for character, name in BLANKS.items():
            if character in blanks:
                message = f"{name} cannot be used here"
                yield Mistake(number, blanks.index(character), message, "use spaces")
    opening = "" if start is None else lines[start.line][start.column : start.column + 1]
    quoted, closing = "quoted scalar" in context, CLOSING.get(opening)
    in_flow = closing is not None and re.search("flow (sequence|mapping)", context)
    if start is not None and opening and (quoted or in_flow):
        inside = mark is not None and mark.line == start.line
        if inside and not quoted and column < len(lines[line].rstrip()):
            message = f"a comma is missing before this, or {closing} for the {opening} before it"
            yield Mistake(line, column, message)
        message = f"the {'quote ' * quoted}{opening} that opens here is not closed"
        yield Mistake(start.line, start.column, message, f"add {opening if quoted else closing}")
    yield from _colon(what, lines, line, start)
    if "cannot start any token" in what or "alphabetic or numeric" in what:
        first = column if "cannot start" in what else column - 1
        value = lines[line][first:].strip()
        message = f"text that begins with {value[:1]} needs quotes"
        yield Mistake(line, first, message, f'write "{value}"')
    if "<block end>" in what and start is not None and line < len(lines):
        column = _indent(lines[line])
        if lines[line].lstrip().startswith("- "):
            hint = "give the list a key, or remove the dash"
            yield Mistake(line, column, "a list's entry among keys", hint)
        depths = {_indent(lines[n]) for n in range(line) if _has_key(lines[n])}
        nearest = min(depths, key=lambda depth: (abs(depth - column), -depth), default=0)
        hint = f"indent it by {nearest} spaces"
        yield Mistake(line, column, "its indentation matches no line above", hint)
    yield Mistake(line, column, f"not valid YAML: {what}{f' {context}' * bool(context)}")


def _colon(what: str, lines: Sequence[str], line: int, start: Any) -> Iterator[Mistake]:
    """Yield a colon that is missing, has no blank after it, or is one too many."""
    if "could not find expected ':'" in what and start is not None:
        yield from _no_colon(lines, start.line)
    if not what.startswith("mapping values are not allowed"):
        return
    before, depth = _before(lines, line), _indent(lines[line])
    if before is not None and depth > _indent(lines[before]):
        yield from _no_key(lines, before)
        message = f"indented deeper than line {before + 1}, which has a value already"
        hint = f"indent it by {_indent(lines[before])} spaces"
        above = _before(lines, before)
        if above is not None and _indent(lines[above]) == depth:
            line, hint = before, f"indent it by {depth} spaces"
            message = "indented less than the lines above and below, and it has a value"
        yield Mistake(line, _indent(lines[line]), message, hint)
    if before is not None and not _has_key(lines[before]):
        yield from _no_colon(lines, before)
    key, _, value = lines[line].partition(":")
    value = value.strip()
    hint = f'put quotes around it: `{key.strip()}: "{value}"`'
    yield Mistake(line, lines[line].index(value, len(key)), "text with a colon in it", hint)


def _no_key(lines: Sequence[str], line: int) -> Iterator[Mistake]:
    """Yield `key:value` and `key = value`."""
    found = KEY.fullmatch(lines[line].rstrip()) if line < len(lines) else None
    if found is not None:
        message = "a space is missing after the colon"
        if found["mark"] == "=":
            message = "a key is followed by a colon, not by ="
        hint = f"write `{found['key']}: {found['value']}`"
        yield Mistake(line, found.start("key"), message, hint)


def _no_colon(lines: Sequence[str], line: int) -> Iterator[Mistake]:
    yield from _no_key(lines, line)
    words = lines[line].strip() if line < len(lines) else ""
    column = _indent(lines[line]) if words else 0
    if re.match(r"#|//|/\*", words):
        yield Mistake(line, column, "a comment begins with #")
    first, _, value = words.partition(" ")
    hint = f"write `{first}:{f' {value}' if value else ''}`"
    yield Mistake(line, column, "a colon is missing here", hint)


def _before(lines: Sequence[str], line: int) -> int | None:
    """The line before it that is neither empty nor a comment."""
    numbers = range(min(line, len(lines)) - 1, -1, -1)
    return next((n for n in numbers if lines[n].strip() and lines[n].strip()[0] != "#"), None)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _has_key(line: str) -> bool:
    return re.match(r"\s*(- )?[^\s#][^:]*:(\s|$)", line) is not None
