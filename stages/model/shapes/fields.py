"""The fields of an architecture's config that arithmetic reads, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import StageError

MOST = 2**31 - 1
"""Of anything that is counted: what is larger is a slip, and would be no size of memory."""
MOST_BLOCKS = 1024
"""More than any model has (1000: Wang et al. 2022, DeepNet); arithmetic walks through each."""


class Fields:
    """A config by the types and ranges that its architecture wants. Methods raise StageError with
    the field, what it is, and what it should be; a field that the family does not have is null."""

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
