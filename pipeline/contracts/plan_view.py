"""A plan as stages' checks see it, and the wires between its slots."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pipeline.contracts.engine import Engine
from pipeline.contracts.signature import gives, needs
from pipeline.contracts.stage import DividesRanks
from pipeline.contracts.training import TrainedRun
from pipeline.errors import Problem


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


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """View of the whole recipe for a stage's `check`: every stage, validated, and the launch."""

    name: str
    seed: int
    procs: int
    """Processes over all nodes."""
    device: str
    """`cpu` or `cuda`, as asked; `auto` is already decided."""
    slots: Mapping[str, Any]
    """Slot name -> stage instance, in order. Slots that have mistakes are missing."""
    wiring: Wiring
    """The slot that each slot takes its artifacts from; slots with mistakes are in it."""
    forecast: bool = False
    """Whether nothing will run: files that only a run reads may still be missing."""

    def slot(self, stage: Any) -> str:
        """The slot of a stage; empty if it is in none."""
        return next((slot for slot, other in self.slots.items() if other is stage), "")

    def producer(self, stage: Any, artifact: type) -> Any | None:
        """The stage whose `artifact` a stage gets; None without one, or if it has mistakes."""
        return self.slots.get(self.wiring.producer(self.slot(stage), artifact) or "")

    def producers(self, stage: Any, artifact: type) -> Iterator[Any]:
        """The stage whose `artifact` a stage gets, then the one whose artifact that has changed,
        and so on to the first: an average, then the engine under it."""
        found = self.wiring.producers(self.slot(stage), artifact)
        return (self.slots[slot] for slot in found if slot in self.slots)

    def readers(self, stage: Any) -> Iterator[Any]:
        """The stages that get a stage's artifact, or one that was made of it, in order."""
        found = self.wiring.readers(self.slot(stage))
        return (self.slots[slot] for slot in found if slot in self.slots)

    def too_late(self, stage: Any, artifact: type) -> str | None:
        """The last slot before the stage's that returns `artifact`, if no slot of the same training
        makes one from this stage's result; None otherwise."""
        wires, own = self.wiring, self.slot(stage)
        readers = itertools.takewhile(
            lambda slot: wires.producer(slot, TrainedRun) is None, wires.readers(own)
        )
        if not own or any(wires.gives(slot, artifact) for slot in readers):
            return None
        earlier = [*itertools.takewhile(lambda slot: slot != own, wires.kinds)]
        return next((slot for slot in reversed(earlier) if wires.gives(slot, artifact)), None)

    def data_ranks(self, stage: Any) -> int:
        """Number of shares of a step's samples under a stage's engine; 0 if these do not divide."""
        wraps = (one for one in self.producers(stage, Engine) if isinstance(one, DividesRanks))
        wrap = next(wraps, None)
        return self.procs if wrap is None else wrap.data_ranks(self.procs)


@runtime_checkable
class Checked(Protocol):
    """A stage that checks itself against the rest of the recipe or the machine."""

    def check(self, plan: PlanView) -> Iterable[Problem]:
        """Yield problems that show only next to other slots. Never raises; imports nothing
        heavy."""
