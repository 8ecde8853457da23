"""Bind what slots have given to the annotated parameters of a method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pipeline.contracts.signature import Need, needs
from pipeline.errors import UsageError

T = TypeVar("T")
Inputs = Mapping[str, str | None]
"""Parameter of a stage's `run` -> the slot whose artifact it gets; None without one."""


class Results(dict[str, Any]):
    """Results by slot, in the order of slots; they are looked up by type."""

    @classmethod
    def of(cls, *given: object) -> Results:
        """Results of no slot, under keys that no slot can have."""
        return cls({f"<{type(one).__name__}>": one for one in given})

    def latest(self, kind: type[T]) -> T | None:
        """The result of the latest slot that gave something of this kind."""
        return next(reversed([*self.each(kind)]), None)

    def each(self, kind: type[T]) -> Iterator[T]:
        """Everything of this kind, in the order of slots; a tuple stands for all that is in it."""
        for given in self.values():
            every = given if type(given) is tuple else (given,)
            yield from (one for one in every if isinstance(one, kind))

    def require(self, kind: type[T], why: str) -> T:
        """The latest result of this kind. Raises UsageError with the message `why` without one."""
        found = self.latest(kind)
        if found is None:
            raise UsageError(why)
        return found

    def missing(self, owner: object, method: str, inputs: Inputs | None = None) -> list[str]:
        """Names of the types that a method requires and that no slot has given."""
        required = (need for need in needs(owner.__class__, method) if not need.optional)
        return [need.type.__name__ for need in required if self._found(need, inputs) is None]

    def call(self, owner: object, method: str, first: object, inputs: Inputs | None = None) -> Any:
        """Call a method with `first` and the results that its parameters get."""
        found = {
            need.parameter: self._found(need, inputs) for need in needs(owner.__class__, method)
        }
        return getattr(owner, method)(first, **found)

    def _found(self, need: Need, inputs: Inputs | None) -> Any | None:
        """The result of the slot that `inputs` name for a parameter; of one that they do not name,
        the latest of its type."""
        if inputs is not None and need.parameter in inputs:
            return self.get(inputs[need.parameter] or "")
        return self.latest(need.type)
