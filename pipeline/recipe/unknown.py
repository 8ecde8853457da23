"""Keys that nothing has a meaning for, and keys that have to be there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.errors import Problem
from pipeline.recipe.nodes import KeyPath


@dataclass(frozen=True, kw_only=True)
class MissingKey(Problem):
    """A key that has to be there."""


@dataclass(frozen=True, kw_only=True)
class NoSlot(Problem):
    """A key at the place of a slot whose value is no mapping."""

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

    @property
    def misplaced_slot(self) -> bool:
        """Whether it is a slot outside of `stages`."""
        return len(self.path) == 1 and isinstance(self.value, dict) and "use" in self.value
