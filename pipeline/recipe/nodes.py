"""A parsed recipe: nested values that know where they were written, and problems at their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.errors import Location, Problem

Scalar = str | int | float | bool | None
KeyPath = tuple[str | int, ...]
"""Keys and list indexes from the recipe's root: `("stages", "train", "steps")`."""
USE, TAKES = RESERVED = "use", "takes"
"""Keys of a slot that are not fields: the stage's name, and the slots that give its artifacts."""


def dotted(path: KeyPath) -> str:
    """The path as people write it: `train.steps`, without the leading `stages`."""
    return ".".join(map(str, path[1:] if len(path) > 1 and path[0] == "stages" else path))


def put(data: Any, path: KeyPath, value: Any) -> None:
    """Set the value at `path` in nested mappings and lists."""
    for part in path[:-1]:
        data = data[part]
    data[path[-1]] = value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested mappings and lists with each value in them changed."""
    if isinstance(value, Mapping):
        return {key: mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(inner, change) for inner in value]
    return change(value)


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Path and value of each entry of nested mappings that holds no further ones, in order."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def texts_in(value: Any) -> Iterator[str]:
    """All texts in nested mappings and lists."""
    found: list[Any] = []
    mapped(value, found.append)
    return (one for one in found if isinstance(one, str))


@dataclass(frozen=True, kw_only=True)
class Node:
    """A scalar, a list or a mapping with its place. Never changed after it is built."""

    value: Scalar | dict[str, Node] | list[Node]
    at: Location
    keys: dict[str, Location] = field(default_factory=dict)
    """Places of a mapping's keys; removed keys may be among them."""
    replaced: Node | None = None
    """A slot's node as it was, with another `use`, before this one took its place."""

    def entries(self) -> dict[str, Node]:
        """A mapping's entries; empty for anything else."""
        return self.value if isinstance(self.value, dict) else {}

    def find(self, path: KeyPath) -> Node | None:
        """The node at `path`; None where nothing is."""
        node: Node | None = self
        for part in path:
            below = None if node is None else node.value
            if isinstance(below, list) and isinstance(part, int):
                node = below[part] if part < len(below) else None
            else:
                node = below.get(str(part)) if isinstance(below, dict) else None
        return node

    def written(self, path: KeyPath) -> Any:
        """The bare value at `path`, with interpolations unresolved: what messages may show."""
        node = self.find(path)
        return None if node is None else plain(node)

    def place(self, path: KeyPath) -> Location:
        """Place of the value at `path`; where nothing is, of the nearest above."""
        while (node := self.find(path)) is None:
            path = path[:-1]
        return node.at

    def key_place(self, path: KeyPath) -> Location:
        """Place of the key at `path`, or of a list's entry, or of the nearest above."""
        while self.find(path) is None:
            path = path[:-1]
        above, place = self.find(path[:-1]), self.place(path)
        return above.keys.get(str(path[-1]), place) if above and path else place

    def problem(
        self, path: KeyPath, /, message: str, hint: str = "", *, kind: type[Problem] = Problem,
        at_key: bool = False, **more: Any,
    ) -> Problem:  # fmt: skip
        """A problem of the value at `path` of this root, or of its key."""
        place = self.key_place(path) if at_key else self.place(path)
        return kind(message=message, hint=hint, key=dotted(path), location=place, **more)

    def slots(self) -> dict[str, Node]:
        """The entries of `stages` of a recipe's root."""
        stages = self.entries().get("stages")
        return stages.entries() if stages is not None else {}

    def with_slots(self, slots: dict[str, Node]) -> Node:
        """A recipe's root with these slots; unchanged without `stages`."""
        stages = self.entries().get("stages")
        if stages is None or not isinstance(stages.value, dict):
            return self
        return replace(self, value={**self.entries(), "stages": replace(stages, value=slots)})


def node_of(value: Any, at: Location) -> Node:
    """The reverse of `plain`, with all of it at one place."""
    if isinstance(value, Mapping):
        return Node(value={key: node_of(child, at) for key, child in value.items()}, at=at)
    if isinstance(value, list):
        return Node(value=[node_of(child, at) for child in value], at=at)
    return Node(value=value, at=at)


def plain(node: Node) -> Any:
    """The bare value: dict, list or scalar."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    return [plain(child) for child in node.value] if isinstance(node.value, list) else node.value


def walk(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Every node below and including `node`, with its path, in written order."""
    yield path, node
    below = enumerate(node.value) if isinstance(node.value, list) else node.entries().items()
    for key, child in below:
        yield from walk(child, (*path, key))


@dataclass(frozen=True, kw_only=True)
class MissingKey(Problem):
    """A key that must be there."""


@dataclass(frozen=True, kw_only=True)
class NoSlot(Problem):
    """A key at the place of a slot whose value is not a mapping."""

    name: str


@dataclass(frozen=True, kw_only=True)
class UnknownKey(Problem):
    """A key of a recipe or an override that has no meaning where it stands. Its hint knows the keys
    of that place only; `pipeline.chain.elsewhere` knows the keys of other places."""

    path: KeyPath
    value: Any = None
    """As it was written."""
    closest: str = ""
    """The key of that place whose name is most like it; empty if none is."""

    @property
    def slot(self) -> str:
        """The slot, or the block at the top of the recipe, that it stands in; empty if none."""
        return str(self.path[-2]) if len(self.path) > 1 else ""

    @property
    def name(self) -> str:
        return str(self.path[-1])

    @property
    def on_command_line(self) -> bool:
        """Whether it stands in no file."""
        return self.location is not None and self.location.on_command_line
