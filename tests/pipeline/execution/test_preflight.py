"""Optional methods that run before training get the artifacts that `run` would get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.chain.plan import Plan, PlannedSlot
from pipeline.contracts.plan_view import Wiring
from pipeline.contracts.resources import ResourceNeed
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Checkpoints, TrainedRun
from pipeline.execution.runner import look_ahead, run_dry
from pipeline.testing import context

CALLS: list[tuple[str, object, object]] = []


class Saving(Checkpoints):
    """Save nothing, under a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self, length: Any) -> None: ...
    def due(self, progress: Any) -> bool: ...
    def save(self, progress: Any) -> None: ...
    def poll(self) -> Any: ...
    def restore(self, validate: Any) -> None: ...
    def resource_needs(self, length: Any) -> Any: ...
    def best(self) -> Any: ...

    def finish(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Look:
    """Look at what it is given."""

    def run(self, ctx: Context, number: int, text: str | None) -> None:
        raise AssertionError("never run")

    def resource_needs(self, ctx: Context, text: str | None, number: int) -> Iterator[ResourceNeed]:
        CALLS.append((ctx.slot, number, text))
        yield from ()

    def run_dry(self, ctx: Context, number: int, text: str | None, run: TrainedRun) -> None:
        CALLS.append((ctx.slot, number, (text, run.checkpoint)))


@dataclass(frozen=True, kw_only=True)
class Save:
    """Save in a dry run."""

    name: str

    def run(self, ctx: Context) -> Checkpoints:
        raise AssertionError("never run")

    def run_dry(self, ctx: Context) -> Checkpoints:
        return Saving(self.name)


def plan(**inputs: str | None) -> Plan:
    save = PlannedSlot(slot="s", use="s.s", stage=Save(name="c"), inputs={}, gives=Checkpoints)
    trained = PlannedSlot(slot="train", use="t.t", stage=None, inputs={}, gives=TrainedRun)
    look = PlannedSlot(slot="look", use="l.l", stage=Look(), inputs=inputs, gives=None)
    numbers = [
        PlannedSlot(slot=slot, use="n.n", stage=None, inputs={}, gives=int)
        for slot in ("a", "b", "c")
    ]
    steps = (*numbers, save, trained, look)
    kinds = {one.slot: None if one.stage is None else type(one.stage) for one in steps}
    view = SimpleNamespace(
        wiring=Wiring(kinds=kinds, inputs={one.slot: one.inputs for one in steps})
    )
    return Plan(recipe=SimpleNamespace(), view=view, slots=steps, per_node=1)  # type: ignore[arg-type]


def test_needs_and_dry_runs_get_what_the_slot_is_wired_to(tmp_path: Path) -> None:
    CALLS.clear()
    artifacts: dict[str, Any] = {"b": 2, "a": 1, "c": "text"}
    ctx = context(tmp_path)
    for wires in ({"number": "a", "text": None}, {"number": "b", "text": "c"}):
        look_ahead(plan(**wires), ctx, artifacts, frozenset({"look"}))
        run_dry(plan(**wires), ctx, artifacts)
    assert CALLS == [
        ("look", 1, None),
        ("look", 1, (None, "c")),
        ("look", 2, "text"),
        ("look", 2, ("text", "c")),
    ]
