"""Numbers as people read them."""

from __future__ import annotations


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
