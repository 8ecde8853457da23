"""The fields of an architecture's config that arithmetic reads, checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from pipeline.errors import StageError

MOST = 2**31 - 1
"""Of anything that is counted: what is larger is a slip, and would be no size of memory."""
MOST_BLOCKS = 1024
"""More than any model has (1000: Wang et al. 2022, DeepNet); arithmetic walks through each."""


class Fields:
    """A config by the types and ranges that its architecture wants. Methods raise StageError with
    the field, what it is, and what it should be; a field that the family does not have is null,
    or false."""

    def __init__(self, kind: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._kind = kind
        self._values = {key: config.get(key, default) for key, default in defaults.items()}

    def count(self, name: str, most: int = MOST) -> int:
        """A whole number from 1."""
        value = self._values[name]
        if type(value) is not int or not 0 < value <= most:  # a bool is an int to isinstance
            self._refuse(name, f"a whole number from 1 to {most}")
        return int(value)

    def count_or_none(self, name: str) -> int | None:
        """The same, or null."""
        return None if self._values.get(name) is None else self.count(name)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._values.get(name, False)
        if type(value) is not bool:
            self._refuse(name, "true or false")
        return bool(value)

    def number(self, name: str) -> float:
        """From 0."""
        value = self._values[name]
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            self._refuse(name, "a number from 0")
        return float(value)

    def word(self, name: str) -> str:
        """A text."""
        value = self._values[name]
        if not isinstance(value, str):
            self._refuse(name, "a name")
        return str(value)

    def given(self, name: str) -> bool:
        """Whether it is not null."""
        return self._values[name] is not None

    def table(self, name: str) -> Mapping[str, Any]:
        """A table; empty where it is null."""
        value = self._values[name]
        if value is not None and not isinstance(value, Mapping):
            self._refuse(name, "a table")
        return value or {}

    def choices(self, name: str, count: int, known: Collection[str]) -> list[str] | None:
        """So many of these words, or null."""
        value = self._values[name]
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or not {*value} <= {*known}:
            self._refuse(name, f"a list of {count} of {', '.join(sorted(known))}")
        return list(value)

    def multiple(self, name: str, of: str, divisor: int) -> int:
        """A whole number of times `divisor`, which the config calls `of`; gives how many times."""
        value = self.count(name)
        if value % divisor:
            self._refuse(name, f"a multiple of {of}, which is {divisor}")
        return value // divisor

    def _refuse(self, name: str, wanted: str) -> None:
        value = self._values[name]
        said = "null" if value is None else repr(value)
        shown = said if len(said) <= 60 else f"{said[:57]}..."
        raise StageError(f"config of a {self._kind}: {name} is {shown}, expected {wanted}")
