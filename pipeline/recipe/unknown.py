"""A key that nothing has a meaning for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.errors import Problem
from pipeline.recipe.nodes import KeyPath


@dataclass(frozen=True, kw_only=True)
class UnknownKey(Problem):
    """A key of a recipe or an override that has no meaning where it stands. Its hint knows the keys
    of that place only; `pipeline.chain.elsewhere` knows those of other places and tools."""

    path: KeyPath
    value: Any = None
    """As it was written."""

    @property
    def misplaced_slot(self) -> bool:
        """Whether it is a slot outside of `stages`."""
        return len(self.path) == 1 and isinstance(self.value, dict) and "use" in self.value
