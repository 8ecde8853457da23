"""The page of a measurement: tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from tables import markdown

GIB = 1 << 30
LOOPS = ("bare", "trainer")


def page(results: Mapping[str, Any]) -> str:
    """Return the page of some results, which may be few."""
    return "\n".join(_parts(results)) + "\n"


def _parts(results: Mapping[str, Any]) -> Iterator[str]:
    device = results.get("device") or {}
    yield f"# Training on one {device.get('name', 'processor')}\n"
    numbers = {name: value for name, value in device.items() if isinstance(value, float)}
    if numbers:
        yield "Ceilings of this device:\n"
        yield markdown(["what", "rate"], [[n, f"{v:.0f}"] for n, v in numbers.items()]) + "\n"
    plans = results.get("plans") or {}
    settings = results.get("settings") or {}
    yield "## Speed\n"
    yield (
        "MFU: operations of the model's products, 6 a trained parameter and token, 4 a frozen one, "
        "and 12 x blocks x heads x head size x length for attention (Chowdhery et al. 2022, "
        "appendix B), over the step's time and the device's dense 16-bit rate; recomputation does "
        "not count, and a causal mask does not halve attention. Ratios are the median over rounds "
        "of our step's time over the other's.\n"
    )
    head = ["setting", "tokens/s", "MFU", "step, s", "of a bare loop", "of the Trainer",
            "first step, s", "load, s"]  # fmt: skip
    yield markdown(head, [_speed(name, one) for name, one in settings.items()]) + "\n"
    yield "## Memory, and the plan\n"
    yield "GiB; the plan's peak is of tensors, beside torch's own peak of what was allocated.\n"
    head = ["setting", "allocated", "planned", "ratio", "reserved", "on the device", "needed by "
            "the plan", "step, s", "planned, s", "ratio"]  # fmt: skip
    rows = [_memory(name, one, plans.get(name, {})) for name, one in settings.items()]
    yield markdown(head, [row for row in rows if row]) + "\n"
    for name, one in settings.items():
        if "profile" in one:
            yield from _profile(name, one["profile"])
        if "saves" in one:
            yield from _saves(name, one)
    failed = {name: one["error"] for name, one in settings.items() if one.get("error")}
    if failed:
        yield "## Failed\n"
        yield markdown(["setting", "why"], [list(item) for item in failed.items()]) + "\n"
    if results.get("tests"):
        yield f"## Tests\n\n{results['tests']['lines'][-1]}\n"


def step_seconds(one: Mapping[str, Any]) -> float | None:
    """Return the median of a setting's steps over its blocks."""
    return statistics.median(one["ours"]) if one.get("ours") else None


def mfu(one: Mapping[str, Any]) -> float | None:
    """Return a setting's model FLOPs utilisation; None where the device's peak is not known."""
    seconds = step_seconds(one)
    if seconds is None or "operations" not in one or "peak_flops" not in one:
        return None
    return float(one["operations"] / seconds / one["peak_flops"])


def ratio(one: Mapping[str, Any], other: str) -> float | None:
    """Return our step's time over another loop's, the median over rounds."""
    if not one.get(other):
        return None
    return statistics.median(o / t for o, t in zip(one["ours"], one[other], strict=False))


def _speed(name: str, one: Mapping[str, Any]) -> list[str]:
    seconds, used = step_seconds(one), mfu(one)
    rate = one["tokens"] / seconds if seconds else None
    return [
        name,
        _number(rate, "{:,.0f}"),
        _number(used, "{:.1%}"),
        _number(seconds, "{:.3f}"),
        *(_number(ratio(one, other), "{:.3f}") for other in LOOPS),
        _number(one.get("first_step_seconds"), "{:.1f}"),
        _number(one.get("slots", {}).get("wrap"), "{:.1f}"),
    ]


def _memory(name: str, one: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    peak, seconds = one.get("peak"), step_seconds(one)
    if not peak:
        return []
    planned, expected = plan.get("peak"), plan.get("seconds")
    return [
        name,
        _gib(peak["allocated"]),
        _gib(planned),
        _number(planned and planned / peak["allocated"], "{:.3f}"),
        _gib(peak["reserved"]),
        _gib(peak["device"]),
        _gib(plan.get("needed")),
        _number(seconds, "{:.3f}"),
        _number(expected, "{:.3f}"),
        _number(expected and seconds and expected / seconds, "{:.2f}"),
    ]


def _profile(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"## A step of {name}\n"
    if "ms" in found:
        yield (
            f"{found['ms']:.1f} ms on the device, {found['busy_ms']:.1f} ms of them busy; gaps "
            f"above 20 us add up to {found['gaps_over_20us_ms']:.1f} ms, the longest is "
            f"{found['longest_gap_ms']:.2f} ms. {found['kernels']} kernels.\n"
        )
        kinds = [[kind, f"{ms:.1f}"] for kind, ms in found["kinds_ms"].items()]
        yield markdown(["kind", "ms"], kinds) + "\n"
        top = [[f"`{t['name']}`", str(t["calls"]), f"{t['ms']:.1f}"] for t in found["top"]]
        yield markdown(["kernel", "calls", "ms"], top) + "\n"
    waits = ", ".join(
        f"{call} {w['calls']} x, {w['ms']:.1f} ms" for call, w in found["waits"].items()
    )
    yield f"Calls that hold up the host: {waits or 'none'}.\n"


def _saves(name: str, one: Mapping[str, Any]) -> Iterator[str]:
    yield f"## Saves of {name}\n"
    rows = [[key, str(value)] for key, value in one["saves"].items()]
    rows += [[f"slot {slot}, seconds", f"{took:.2f}"] for slot, took in one["slots"].items()]
    yield markdown(["what", "value"], rows) + "\n"


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
