"""What is another than it was planned."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.planning.saved_plan import Identity

SHOWN = 60
"""Characters of a value that a message shows."""
LEAD = 20
"""How many of them, of a longer value, are before what differs."""


def drift(planned: Identity, now: Identity) -> Iterator[str]:
    """Each difference in words, with both values."""
    compare = _Compare(planned.folder, now.folder)
    for slot in sorted({*planned.stages, *now.stages}):
        before, after = planned.stages.get(slot), now.stages.get(slot)
        if before is None or after is None:
            yield f"slot `{slot}` is {'new' if before is None else 'gone'}"
        elif before.get("use") != after["use"]:
            yield _told(f"{slot}.use", before.get("use"), after["use"])
        else:
            yield from compare.differences(slot, before, after)
    rest = {"stages", "versions", "folder"}
    yield from compare.differences(
        "", planned.model_dump(exclude=rest), now.model_dump(exclude=rest)
    )
    # A package that only one side has is an optional one, which the plan did without.
    for package in sorted(planned.versions.keys() & now.versions.keys()):
        yield from compare.differences(package, planned.versions[package], now.versions[package])


@dataclass(frozen=True)
class _Compare:
    """Values of two plans. A file is the same if it is called the same from both recipes, which
    have moved together with it, or if it is the same file, beside which a recipe has moved."""

    before: str
    """Folder of the recipe that was planned."""
    after: str

    def differences(self, place: str, before: Any, after: Any) -> Iterator[str]:
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            for key in sorted({*before, *after}):
                inner = f"{place}.{key}" if place else key
                yield from self.differences(inner, before.get(key), after.get(key))
        elif not self._same(before, after):
            yield _told(place, before, after)

    def _same(self, before: Any, after: Any) -> bool:
        if isinstance(before, list) and isinstance(after, list):
            return len(before) == len(after) and all(map(self._same, before, after))
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            return not any(self.differences("", before, after))
        if before == after:
            return True
        if not isinstance(before, str) or not isinstance(after, str):
            return False
        return _absolute(before, self.before) == _absolute(after, self.after)


def _absolute(text: str, folder: str) -> str:
    if not text.startswith(("./", "../")):
        return text
    return os.path.normpath(f"{folder}/{text}")


def _told(place: str, before: Any, after: Any) -> str:
    shown = [json.dumps(value) for value in (after, before)]
    same = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*shown, strict=False)))
    return f"{place} is {_cut(shown[0], same)} instead of {_cut(shown[1], same)}"


def _cut(text: str, same: int) -> str:
    """The text, or so much of a long one that it shows where it begins to differ."""
    if len(text) <= SHOWN:
        return text
    first = max(min(same - LEAD, len(text) - SHOWN), 0)
    last = first + SHOWN
    return f"{'...' * (first > 0)}{text[first:last]}{'...' * (last < len(text))}"
