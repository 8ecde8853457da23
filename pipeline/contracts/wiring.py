"""Wires between slots: the slot that each stage takes an artifact from, decided once for a
recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.contracts.signature import gives, needs


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The wires of a recipe, between names of slots."""

    kinds: Mapping[str, type | None]
    """Slot -> class of its stage, in order; None for one that cannot be loaded."""
    inputs: Mapping[str, Mapping[str, str | None]]
    """Slot -> parameter of `run` -> the slot whose artifact it gets; None without one."""

    def gives(self, slot: str, artifact: type) -> bool:
        """Whether a slot returns `artifact` or a subclass of it."""
        stage = self.kinds[slot]
        return stage is not None and issubclass(gives(stage) or object, artifact)

    def producer(self, slot: str, artifact: type) -> str | None:
        """The slot whose `artifact` a slot gets, for the first parameter of that type."""
        stage = self.kinds.get(slot)
        for need in needs(stage) if stage is not None else ():
            if issubclass(need.type, artifact) or issubclass(artifact, need.type):
                return self.inputs[slot][need.parameter]
        return None

    def producers(self, slot: str, artifact: type) -> Iterator[str]:
        """The slot whose `artifact` a slot gets, then the slot whose artifact that one has changed,
        and so on to the first."""
        found = self.producer(slot, artifact)
        while found is not None:
            yield found
            found = self.producer(found, artifact)

    def readers(self, slot: str) -> Iterator[str]:
        """Slots that get the artifact of a slot, in order: directly, or inside of another one,
        which a slot has made of it and which is of the same type."""
        holders = {slot}
        for other, inputs in self.inputs.items():
            stage = self.kinds[other]
            taken = [parameter for parameter, giver in inputs.items() if giver in holders]
            if stage is None or not taken:
                continue
            yield other
            given = gives(stage) or object
            kinds = [need.type for need in needs(stage) if need.parameter in taken]
            if any(issubclass(given, kind) for kind in kinds):
                holders.add(other)
