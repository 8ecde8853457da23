"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def count(value: float) -> str:
    """Return `950`, `12,345`, `3.4 M` or `1.2 B`."""
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.1f} {unit}"
    return f"{value:,.0f}"


def gib(size: float) -> str:
    """Return a number of bytes as `61.2`, in GiB."""
    return f"{size / (1 << 30):.1f}"


def percent(share: float) -> str:
    """Return a share, 0 to 1, as `41.2 %`."""
    return f"{100 * share:.1f} %"


def number(value: float | None, form: str = ".4f") -> str:
    """Return a measurement as text; None stands for what JSON has no number for."""
    return "not a number" if value is None else f"{value:{form}}"


def held_out(evaluations: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> str:
    """Return the held-out loss as `3.4000 (step 0) -> 2.9000 (step 60), best 2.8500 (step 40)`:
    the first and the last, and the best if that is another; empty without an evaluation."""
    if not evaluations:
        return ""
    first, last = evaluations[0], evaluations[-1]
    told = [first] if first["step"] == last["step"] else [first, last]
    text = " -> ".join(f"{number(one['eval_loss'])} (step {one['step']})" for one in told)
    if best is not None and best["step"] not in (one["step"] for one in told):
        text += f", best {number(best['eval_loss'])} (step {best['step']})"
    return text
