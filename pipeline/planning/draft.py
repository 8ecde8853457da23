"""A recipe that is being drawn up, with the reasons for what is in it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.planning.search import Change


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A recipe as values, and comments on some of them."""

    head: Sequence[str]
    """Lines of comment at the top."""
    top: Mapping[str, Any]
    """What is said besides the stages."""
    slots: Mapping[str, Mapping[str, Any]]
    reasons: Mapping[str, str]
    """`slot` or `slot.field` -> comment."""

    def changed(self, changes: Sequence[Change]) -> Draft:
        """With changes laid over it, and why."""
        slots: dict[str, dict[str, Any]] = {
            s: dict(copy.deepcopy(v)) for s, v in self.slots.items()
        }
        for change in changes:
            slot, _, field = change.path.partition(".")
            if field:
                slots[slot][field] = change.value
            else:
                slots[slot] = change.value
        every = {**self.reasons, **{change.path: change.why for change in changes}}
        return Draft(head=self.head, top=self.top, slots=slots, reasons=every)

    def text(self) -> str:
        """YAML."""
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        for line in self.head:
            yield f"# {line}".rstrip()
        yield ""
        for key, value in self.top.items():
            yield f"{key}: {json.dumps(value)}"
        yield ""
        yield "stages:"
        for slot, fields in self.slots.items():
            yield from self._slot(slot, fields)

    def _slot(self, slot: str, fields: Mapping[str, Any]) -> Iterator[str]:
        if slot in self.reasons:
            yield f"  # {self.reasons[slot]}"
        yield f"  {slot}:"
        for key, value in fields.items():
            why = self.reasons.get(f"{slot}.{key}")
            text = f"    {key}: {value if key == 'use' else json.dumps(value)}"
            yield f"{text}  # {why}" if why else text
