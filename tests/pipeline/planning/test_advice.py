"""Which way `pipe advise` takes, and what it says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import Problem, RecipeError, StageError
from pipeline.planning.hardware import Asked
from pipeline.planning.margins import Margins, Shortage
from pipeline.planning.planner import (
    CHUNK,
    NARROW_FROZEN,
    NARROW_MOMENTS,
    RECOMPUTE,
    SMALLER,
    Planners,
    Saving,
    Tier,
    Topology,
)
from pipeline.planning.report import memory
from pipeline.planning.search import Base, Changes, Saved, Way, balanced, best, leanest
from pipeline.planning.step_time import StepTime
from pipeline.planning.strategies import choose, suited
from pipeline.presets import Strategy
from pipeline.registry import Registry

ROOM = 10
SAVED = {"again": 5, "chunk": 3, "moments": 4, "frozen": 6}
"""Field -> what it saves, in GiB; each halving of micro-batches saves 2."""
ORDERS = {
    "again": RECOMPUTE, "chunk": CHUNK, "moments": NARROW_MOMENTS, "frozen": NARROW_FROZEN
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One that can do with less, from what is set, and its own planner."""

    set: Mapping[str, Any]

    def savings(self, ranks: int) -> Iterator[Saving]:
        for name, order in ORDERS.items():
            if name not in self.set:
                yield Saving(order=order, what=name, fields={name: True})
        size = self.set.get("micro", 4)
        if size > 1:
            yield Saving(order=SMALLER, what="smaller", fields={"micro": size // 2})


@dataclass(frozen=True, kw_only=True)
class Fake(Base):
    """A recipe that needs so many GiB under each strategy, of all nodes together."""

    needs: Mapping[str, float]
    lacks: Sequence[str] = ()
    """Fields that the model cannot have."""
    refuses: Sequence[str] = ()
    """Fields, and strategies, that do not go with the recipe."""
    saves: Mapping[str, float] = field(default_factory=lambda: SAVED)

    def checked(self, changes: Changes) -> Any:
        fields = {path.partition(".")[2]: value for path, value in changes.items() if "." in path}
        wrap = changes.get("wrap", {"use": ""})["use"]
        for name in {*fields, wrap} & {*self.refuses}:
            raise RecipeError([Problem(message=f"no {name}", key="wrap")])
        step = SimpleNamespace(slot="train", stage=Stage(fields), gives=None)
        return SimpleNamespace(steps=[step], view=SimpleNamespace(procs=8), wrap=wrap)

    def drawn(self, changes: Changes) -> Any:
        plan = self.checked(changes)
        fields = plan.steps[0].stage.set
        if {*fields} & {*self.lacks}:
            raise StageError("the model cannot have it")
        needed = self.needs[plan.wrap] / (self.asked.nodes or 1)
        needed -= sum(self.saves[name] for name in self.saves if name in fields)
        needed -= {4: 0, 2: 2, 1: 4}[fields.get("micro", 4)]
        seconds = 4 * (4 / 3 if "again" in fields else 1) + 5 * (plan.wrap == "wrap.slow")
        return plan_of(needed, seconds=seconds)


def fake(**needs_and_more: Any) -> Fake:
    return Fake(
        recipe=Path(), asked=Asked(gpus=8), margins=Margins(), registry=Registry([]),
        **needs_and_more,
    )  # fmt: skip


def plan_of(
    device: float, *, hosts: int | None = None, seconds: float = 4.0, unknown: Sequence[str] = ()
) -> Any:
    """A plan that needs so many GiB of a GPU with ROOM, and 3 GiB of a host."""
    gib = 1 << 30
    short = Shortage(
        place="device", what="memory of a GPU", phase="", needed=int(device * gib), there=0
    )
    parts = {"compute": seconds}
    return SimpleNamespace(
        topology=Topology(ranks=8, local_ranks=8, device="cuda"),
        hardware=SimpleNamespace(device_memory=ROOM * gib, host_memory=hosts and hosts * gib),
        margins=SimpleNamespace(of=lambda tensors: tensors),
        estimate=SimpleNamespace(peak=int(device * gib), host_peak=3 * gib),
        short=[short] if device > ROOM else [],
        time=StepTime(parts=parts, reached=parts, unknown=unknown, overlaps=True),
        idle=0,
    )


@pytest.fixture(autouse=True)
def planners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are their own planners."""
    found = SimpleNamespace(of=lambda plan: {step.slot: step.stage for step in plan.steps})
    monkeypatch.setattr(Planners, "installed", lambda: found)


def saved(way: Way) -> str:
    """Fields, and the size of micro-batches."""
    changes = {path.partition(".")[2]: value for path, value in way.saving.items()}
    named = (name if value is True else f"{name}={value}" for name, value in changes.items())
    return " ".join(named)


def found(base: Base, **how: bool) -> Way:
    return balanced(leanest(base, {}, **how))


@given(needs=st.floats(0, 40), saves=st.fixed_dictionaries(dict.fromkeys(SAVED, st.floats(0, 6))))
def test_what_is_saved_in_the_end_is_needed_or_makes_room(
    needs: float, saves: Mapping[str, float]
) -> None:
    way = found(fake(needs={"": needs}, saves=saves))
    if not way.fits:
        slower = saves["again"] + saves["chunk"] + 4
        assert needs - slower - max(saves["moments"], saves["frozen"]) > ROOM
        return
    assert sum(one.order > SMALLER for one in way.saved) <= 1
    for order in {one.order for one in way.saved}:
        less = way.less(order)
        slower_step = less.drawn.time.expected > way.drawn.time.expected
        roomier = way.drawn.estimate.peak < less.drawn.estimate.peak
        assert not less.fits or roomier or slower_step


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (9, "chunk micro=1"),  # which cost no time
        (16, "chunk micro=1"),
        (18, "again chunk micro=1"),
        (22, "again chunk micro=1"),
        (25, "again chunk micro=1 moments"),
        (28, "again chunk micro=1 frozen"),  # in place of moments, which do not do
    ],
)
def test_what_costs_time_is_saved_before_what_is_computed(needs: int, expected: str) -> None:
    assert saved(found(fake(needs={"": needs}))) == expected


def test_nothing_in_fewer_bits_where_it_may_not_be() -> None:
    least = found(fake(needs={"": 25}), narrow=False)
    assert not least.fits
    assert saved(least) == "again chunk micro=1"


@pytest.mark.parametrize("how", ["lacks", "refuses"])
def test_what_cannot_be_saved_is_left_out(how: str) -> None:
    base = fake(needs={"": 18}, **{how: ["chunk"]})
    assert saved(found(base)) == "again micro=1"


def way_of(drawn: Any, *orders: int) -> Way:
    base = SimpleNamespace(drawn=lambda changes: drawn)
    return Way(base=base, start={}, saved=[Saved(order, "", {}) for order in orders])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ways", "chosen"),
    [
        ([way_of(plan_of(11))], None),
        ([way_of(plan_of(11)), way_of(plan_of(9), RECOMPUTE)], 1),
        ([way_of(plan_of(9, seconds=4.3)), way_of(plan_of(9), RECOMPUTE)], 0),
        ([way_of(plan_of(9, seconds=4.5)), way_of(plan_of(9), RECOMPUTE)], 1),
        ([way_of(plan_of(9, seconds=9), RECOMPUTE), way_of(plan_of(9), NARROW_MOMENTS)], 0),
        ([way_of(plan_of(9), NARROW_FROZEN), way_of(plan_of(9), NARROW_MOMENTS, CHUNK)], 1),
        ([way_of(plan_of(9, seconds=9, unknown=["network"])), way_of(plan_of(9), CHUNK)], 0),
        ([way_of(plan_of(9.5)), way_of(plan_of(8))], 1),
    ],
)
def test_the_best_way(ways: Sequence[Way], chosen: int | None) -> None:
    assert best(ways) is (None if chosen is None else ways[chosen])


def strategy(name: str, order: int) -> Strategy:
    return Strategy(name=name, use=f"wrap.{name}", fields={}, what=name, order=order)


DDP, FSDP = strategy("ddp", Tier.REPLICATED), strategy("fsdp", Tier.SHARDED)
HYBRID = strategy("hybrid", Tier.SHARDED_WITHIN_NODES)
SLOW, DISK = strategy("slow", Tier.OFFLOADED), strategy("disk", Tier.OFFLOADED_TO_DISK)


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ((9, 9, 1, 1), "ddp"),
        ((22, 9, 1, 1), "fsdp"),  # before anything is computed again
        ((50, 27, 1, 1), "fsdp"),  # in fewer bits, before anything is offloaded
        ((50, 50, 9, 1), "slow"),
        ((50, 50, 50, 9), "disk"),
    ],
)
def test_the_strategy_that_gives_up_least(needs: Sequence[int], expected: str) -> None:
    names = ["wrap.ddp", "wrap.fsdp", "wrap.slow", "wrap.disk"]
    base = fake(needs=dict(zip(names, needs, strict=True)))
    tried, refused = choose(base, [DDP, FSDP, SLOW, DISK], "wrap")
    assert tried[0].strategy.name == expected
    assert refused == []
    later = {"ddp": {"slow", "disk"}, "fsdp": {"slow", "disk"}, "slow": {"disk"}, "disk": set()}
    assert not {one.strategy.name for one in tried} & later[expected]


def test_what_does_not_go_with_the_recipe_is_refused() -> None:
    base = fake(needs={"wrap.ddp": 9}, refuses=["wrap.fsdp"])
    tried, (refused,) = choose(base, [DDP, FSDP], "wrap")
    assert [one.strategy for one in tried] == [DDP]
    assert refused.startswith("fsdp: ")
    assert "no wrap.fsdp" in refused


@pytest.mark.parametrize(
    ("ranks", "local", "device", "names"),
    [
        (1, 1, "cuda", "ddp slow disk"),
        (8, 8, "cuda", "ddp fsdp slow disk"),
        (4, 1, "cuda", "ddp fsdp slow disk"),
        (16, 8, "cuda", "ddp hybrid fsdp slow disk"),
        (1, 1, "cpu", "ddp"),
    ],
)
def test_strategies_that_differ_there(ranks: int, local: int, device: str, names: str) -> None:
    topology = Topology(ranks=ranks, local_ranks=local, device=device)
    found = suited([DDP, HYBRID, FSDP, SLOW, DISK], topology)
    assert " ".join(one.name for one in found) == names


def test_a_host_that_is_not_known_is_a_condition() -> None:
    assert memory(plan_of(2)) == "2.0 GiB of 10.0 a GPU, if a host has 3.0 GiB"
    assert memory(plan_of(2, hosts=4)) == "2.0 GiB of 10.0 a GPU, 3.0 GiB of 4.0 a host"
