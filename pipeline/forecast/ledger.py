"""The memory of one rank while a step goes on: what is taken, what is given back, and when it was
most."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Place = Literal["device", "host", "disk"]
"""Memory of the accelerator, of its machine, or files of offloaded state."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What one place held when it held the most during a phase."""

    bytes: int
    items: Mapping[str, int]
    """Item -> bytes, of those that are not zero, in the order in which they first appeared."""


@dataclass(kw_only=True)
class Ledger:
    """A log of changes. Peaks are looked for afterwards, so that a change costs next to nothing."""

    formulas: dict[str, str] = field(default_factory=dict)
    """Item -> how its bytes come about, for people."""
    _changes: list[tuple[str, Place, int]] = field(default_factory=list, repr=False)
    _now: dict[str, int] = field(default_factory=dict, repr=False)
    _taken: int = field(default=0, repr=False)
    _phases: list[tuple[str, int]] = field(default_factory=list, repr=False)

    def phase(self, name: str) -> None:
        """What comes now belongs to this phase; a phase can be entered again."""
        self._phases.append((name, len(self._changes)))

    def change(self, item: str, amount: int, place: Place = "device") -> None:
        """So many bytes more, or fewer, of an item."""
        if amount:
            self._changes.append((item, place, amount))
            self._taken += amount if amount > 0 and place == "device" else 0
            self._now[item] = self._now.get(item, 0) + amount

    @property
    def taken(self) -> int:
        """Bytes that were ever taken on the device."""
        return self._taken

    def now(self, item: str) -> int:
        """Bytes of an item, wherever."""
        return self._now.get(item, 0)

    def pulse(self, item: str, amount: int, place: Place = "device") -> None:
        """Bytes that are there for a moment only."""
        self.change(item, amount, place)
        self.change(item, -amount, place)

    def explain(self, item: str, formula: str) -> None:
        """Say once how an item's bytes come about."""
        self.formulas.setdefault(item, formula)

    def held(self, place: Place = "device") -> dict[str, int]:
        """What is there now, by item."""
        return self._held(len(self._changes), (place,))

    def peaks(self, *places: Place) -> dict[str, Peak]:
        """Phase -> the peak of what these places hold together, in the order in which phases were
        first entered."""
        tops: dict[str, tuple[int, int]] = {}
        starts = [*self._phases, ("", len(self._changes))]
        now = sum(amount for _, at, amount in self._changes[: starts[0][1]] if at in places)
        for (name, start), (_, end) in itertools.pairwise(starts):
            top, where = tops.get(name, (now, start))
            if now > top:
                top, where = now, start
            for index in range(start, end):
                _, at, amount = self._changes[index]
                if at in places:
                    now += amount
                    if now > top:
                        top, where = now, index + 1
            tops[name] = (top, where)
        return {
            name: Peak(bytes=top, items=self._held(where, places))
            for name, (top, where) in tops.items()
        }

    def _held(self, count: int, places: tuple[Place, ...]) -> dict[str, int]:
        items: dict[str, int] = {}
        for item, at, amount in self._changes[:count]:
            if at in places:
                items[item] = items.get(item, 0) + amount
        return {item: amount for item, amount in items.items() if amount}
