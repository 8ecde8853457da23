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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from pipeline.errors import Location, Problem
from pipeline.recipe.nodes import Node, Scalar
from pipeline.recipe.yaml_errors import explain

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
        line, column, message, hint = explain(error, text)
        parser.say(locate(line, column), message, hint)
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

    def _next(self) -> Any:
        return self._loader.get_event()  # type: ignore[no-untyped-call]

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
            return self._alias(event)
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

    def _alias(self, event: Any) -> _Built:
        if event.anchor not in self._anchors:
            hint = f'put quotes around text that begins with *: "*{event.anchor}"'
            self._stop(event, f"nothing is anchored as `&{event.anchor}` above", hint)
        built = self._anchors[event.anchor]
        if built is None:
            self._stop(event, f"`*{event.anchor}` contains itself")
        return built

    def _collection(self, event: Any, depth: int) -> _Built:
        if depth >= MAX_DEPTH:
            self._stop(event, f"nested deeper than {MAX_DEPTH} levels")
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        place, is_mapping, size = self._place(event), isinstance(event, yaml.MappingStartEvent), 1
        items: list[Node] = []
        mapping = Node(value={}, at=place)
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
        return _Built(mapping if is_mapping else Node(value=items, at=place), size)

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
