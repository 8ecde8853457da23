"""Where every key and value of a recipe was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Location

Path = tuple[str | int, ...]
"""Keys and list indexes from the recipe's root: `("stages", "train", "steps")`."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Places of keys and values by path. A path that nobody wrote takes its nearest ancestor's."""

    keys: Mapping[Path, Location]
    values: Mapping[Path, Location]
    """Holds at least the root, `()`."""
    data: Any
    """The values as written, with interpolations unresolved: what messages may show."""

    def value(self, path: Path) -> Location:
        """Where the value at `path` stands."""
        while path not in self.values:
            path = path[:-1]
        return self.values[path]

    def key(self, path: Path) -> Location:
        """Where the key at `path` stands; for a list's entry, where the entry stands."""
        while path not in self.keys and path not in self.values:
            path = path[:-1]
        return self.keys.get(path) or self.values[path]


def dotted(path: Path) -> str:
    """The path as people write it: `train.steps`, without the leading `stages`."""
    shown = path[1:] if len(path) > 1 and path[0] == "stages" else path
    return ".".join(str(part) for part in shown)


def lookup(data: Any, path: Path) -> Any:
    """The value at `path` in nested mappings and lists; None where nothing is."""
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data
