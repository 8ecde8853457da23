"""YAML text -> nodes with line and column, under tight limits.

Built from PyYAML's events instead of its composer, which recurses, expands aliases without a limit
and drops what the limits have to look at. Refused: tags of any kind, a second document, merge keys
(`<<`), recursive aliases, more than MAX_DEPTH levels, more than MAX_VALUES values once aliases are
expanded. Nothing is ever constructed but text, numbers, booleans, null, lists and mappings.

Text that starts with `./` or `../` is a path relative to the file it is written in (on the command
line: to the current folder) and becomes absolute here, before files are merged. This holds for any
value, whatever its field; write other text that begins so without the dot.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import Location, Problem
from pipeline.recipe.nodes import Node
from pipeline.recipe.scalars import Scalar, resolve
from pipeline.recipe.yaml_errors import explain

MAX_DEPTH = 64
MAX_VALUES = 10_000

Locate = Callable[[int, int], Location]
"""(zero-based line, zero-based column) -> place."""


class _StopError(Exception):
    """The rest of the text is not worth reading; the problem is already noted."""


@dataclass(kw_only=True)
class _Built:
    """A finished node, with what only the parser needs to know of it."""

    node: Node
    size: int = 1
    """Values in it with aliases expanded."""
    text: str | None = None
    """A scalar as written; None for lists and mappings."""
    plain: bool = False


@dataclass(kw_only=True)
class _Open:
    """A list or mapping whose end has not come yet."""

    at: Location
    anchor: str | None
    mapping: bool
    size: int = 1
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Location] = field(default_factory=dict)
    key: _Built | None = None
    """A mapping's key that waits for its value."""

    def close(self) -> _Built:
        value = self.entries if self.mapping else self.items
        return _Built(node=Node(value=value, at=self.at, keys=self.keys), size=self.size)


def parse(text: str, *, locate: Locate, folder: Path) -> tuple[Node | None, list[Problem]]:
    """The root node and every mistake found. The node is None for an empty text and when the text
    is not YAML at all (then there is a problem)."""
    return _Parser(locate, folder).parse(text)


class _Parser:
    def __init__(self, locate: Locate, folder: Path) -> None:
        self._locate = locate
        self._folder = folder
        self._problems: list[Problem] = []
        self._stack: list[_Open] = []
        self._anchors: dict[str, _Built | None] = {}
        self._root: _Built | None = None

    def parse(self, text: str) -> tuple[Node | None, list[Problem]]:
        try:
            loader = yaml.SafeLoader(text)
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            column = error.position - before.rfind("\n") - 1
            message = f"the character U+{ord(text[error.position]):04X} is not allowed"
            self._say(self._locate(before.count("\n"), column), message)
            return None, self._problems
        try:
            while loader.check_event():
                self._take(loader.get_event())  # type: ignore[no-untyped-call]
        except yaml.MarkedYAMLError as error:
            mistake = explain(error, text)
            self._say(self._locate(mistake.line, mistake.column), mistake.message, mistake.hint)
        except (ValueError, OverflowError):
            # PyYAML lets chr() and int() fail on absurd escapes and version numbers
            place = self._locate(loader.line, loader.column)
            self._say(place, "this is not a character or number that exists")
        except _StopError:
            pass
        return (self._root.node if self._root and not self._stack else None), self._problems

    def _take(self, event: Any) -> None:
        if isinstance(event, yaml.DocumentStartEvent) and self._root is not None:
            self._problem(event.start_mark, "a second document starts here", "one file, one recipe")
            raise _StopError
        if getattr(event, "tag", None) is not None:
            hint = "a recipe holds only text, numbers, true, false, null, lists and mappings"
            self._problem(event.start_mark, f"tags such as `{event.tag}` are not allowed", hint)
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._open(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            closed = self._stack.pop()
            self._finish(closed.close(), closed.anchor)

    def _scalar(self, event: Any) -> None:
        bare = event.style is None
        value: Scalar = resolve(event.value) if bare else event.value
        if isinstance(value, str):
            value = self._text(value, event.start_mark)
        if bare and value == "None":
            self._problem(event.start_mark, "`None` is text in YAML", "write null")
        node = Node(value=value, at=self._place(event.start_mark))
        self._finish(_Built(node=node, text=event.value, plain=bare), event.anchor)

    def _text(self, value: str, mark: Any) -> str:
        if re.search("[\ud800-\udfff]", value):
            self._problem(mark, "half a surrogate pair is not a character")
            return ""
        if re.fullmatch(r"\\*\?\?\?", value):
            self._problem(mark, "`???` stands for no value here", "give one, or leave the key out")
        if value.startswith(("./", "../")):
            # abspath, not resolve: a link keeps the name that the person gave it
            return os.path.abspath(self._folder / value)  # noqa: PTH100
        return value

    def _alias(self, event: Any) -> None:
        if event.anchor not in self._anchors:
            hint = f'put quotes around text that begins with *: "*{event.anchor}"'
            message = f"nothing is anchored as `&{event.anchor}` above"
            self._problem(event.start_mark, message, hint)
            raise _StopError
        built = self._anchors[event.anchor]
        if built is None:
            self._problem(event.start_mark, f"`*{event.anchor}` contains itself")
            raise _StopError
        self._finish(built, None)

    def _open(self, event: Any) -> None:
        if len(self._stack) >= MAX_DEPTH:
            self._problem(event.start_mark, f"nested deeper than {MAX_DEPTH} levels")
            raise _StopError
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        mapping = isinstance(event, yaml.MappingStartEvent)
        place = self._place(event.start_mark)
        self._stack.append(_Open(at=place, anchor=event.anchor, mapping=mapping))

    def _finish(self, built: _Built, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = built
        if not self._stack:
            self._root = built
            return
        parent = self._stack[-1]
        if parent.mapping and parent.key is None:
            parent.key = built
            return
        parent.size += built.size
        if parent.size > MAX_VALUES:
            self._say(parent.at, f"holds more than {MAX_VALUES} values", "aliases count in full")
            raise _StopError
        if parent.key is None:
            parent.items.append(built.node)
        else:
            self._entry(parent, parent.key, built.node)
            parent.key = None

    def _entry(self, parent: _Open, key: _Built, value: Node) -> None:
        if not key.text:
            # two braces open a mapping in a mapping: the value as a whole is meant as text
            place = parent.at if isinstance(key.node.value, dict) else key.node.at
            self._say(place, "a key must be text", "put quotes around text with { or [")
        elif key.text == "<<" and key.plain:
            self._say(key.node.at, "merge keys (`<<`) are not allowed", "use `extends`")
        elif key.text in parent.entries:
            first = parent.keys[key.text]
            where = f"first on line {first.line}" if first.line else ""
            self._say(key.node.at, f"`{key.text}` is given twice", where)
        else:
            parent.entries[key.text] = value
            parent.keys[key.text] = key.node.at

    def _place(self, mark: Any) -> Location:
        return self._locate(mark.line, mark.column)

    def _problem(self, mark: Any, message: str, hint: str = "") -> None:
        self._say(self._place(mark), message, hint)

    def _say(self, place: Location, message: str, hint: str = "") -> None:
        self._problems.append(Problem(message=message, hint=hint, location=place))
