"""A parsed recipe: nested values that know where they were written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import Location
from pipeline.marks import Marks, Path
from pipeline.scalars import Scalar


@dataclass(frozen=True, kw_only=True)
class Node:
    """A scalar, a list or a mapping with its place. Never changed after it is built."""

    value: Scalar | dict[str, Node] | list[Node]
    at: Location
    keys: dict[str, Location] = field(default_factory=dict)
    """A mapping's keys and where they stand."""

    def entries(self) -> dict[str, Node]:
        """A mapping's entries; empty for anything else."""
        return self.value if isinstance(self.value, dict) else {}


def plain(node: Node) -> Any:
    """The bare value: dict, list or scalar."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def walk(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every node below and including `node`, with its path, in written order."""
    yield path, node
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield from walk(child, (*path, key))
    elif isinstance(node.value, list):
        for index, child in enumerate(node.value):
            yield from walk(child, (*path, index))


def marks_of(root: Node) -> Marks:
    """What is written where."""
    keys: dict[Path, Location] = {}
    values: dict[Path, Location] = {}
    for path, node in walk(root):
        values[path] = node.at
        keys.update({(*path, key): place for key, place in node.keys.items()})
    return Marks(keys=keys, values=values, data=plain(root))
