"""Something about a machine that will hurt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from pipeline.doctor.report import MachineReport

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Training will fail; it will be slow, or may fail later; worth knowing. The worst first."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`name` is that of docs/doctor.md; `seen` is what, `why` why it matters, `do` what helps."""

    severity: Severity
    name: str
    seen: str
    why: str
    do: str


Rule = Callable[[MachineReport], Iterator[Finding]]
"""Says what it finds in a machine, which it does not look at itself."""
