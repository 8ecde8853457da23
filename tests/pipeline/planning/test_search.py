"""Choices of `pipe advise`, and its sentences about them."""

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
from pipeline.planning import planner, search
from pipeline.planning.hardware import HardwareOptions
from pipeline.planning.planner import Planners, Saving, Strategy, Tier
from pipeline.planning.search import Candidate, Changes, SearchBase, best, choose, relaxed, suited
from pipeline.planning.shapes import Topology
from pipeline.planning.step_time import StepTime

ROOM, ROOMY = 10, 9
"""GiB of a GPU, and what advice uses of them if it can."""
SAVED = {"again": 5, "chunk": 3, "moments": 4, "frozen": 6}
"""GiB that a field saves; each halving of micro-batches saves 2."""
KINDS = (planner.RECOMPUTE, planner.CHUNK, planner.NARROW_MOMENTS, planner.NARROW_FROZEN)
VIEW = SimpleNamespace(procs=8, data_ranks=lambda stage: 8, device="cuda")
ORDERS = dict(zip(SAVED, KINDS, strict=True))


@dataclass(frozen=True)
class Stage:
    """A stage that can save memory through its fields, and its own planner."""

    set: Mapping[str, Any]

    @property
    def stage(self) -> Stage:
        return self

    def savings(self, ranks: int) -> Iterator[Saving]:
        for name, order in ORDERS.items():
            if name not in self.set:
                yield Saving(order=order, what=name, fields={name: True})
        if self.set.get("micro", 4) > 1:
            fields = {"micro": self.set.get("micro", 4) // 2}
            yield Saving(order=planner.SMALLER, what="smaller", fields=fields)


@dataclass(frozen=True, kw_only=True)
class Fake(SearchBase):
    """A recipe that needs the given GiB under each strategy, over all nodes."""

    recipe: Path = Path()
    machines: HardwareOptions = field(default_factory=lambda: HardwareOptions(gpus=8))
    margins: Any = None
    registry: Any = None
    needs: Mapping[str, float]
    lacks: Sequence[str] = ()
    """Fields that the model does not support."""
    refuses: Sequence[str] = ()
    """Fields and strategies that conflict with the recipe."""
    saves: Mapping[str, float] = field(default_factory=lambda: SAVED)

    def checked(self, changes: Changes) -> Any:
        fields = {path.partition(".")[2]: value for path, value in changes.items() if "." in path}
        wrap = changes.get("wrap", {"use": ""})["use"]
        for name in {*fields, wrap} & {*self.refuses}:
            raise RecipeError([Problem(message=f"no {name}", key="wrap")])
        step = SimpleNamespace(slot="train", stage=Stage(fields), gives=None)
        return SimpleNamespace(slots=[step], view=VIEW, wrap=wrap)

    def memory_plan(self, changes: Changes) -> Any:
        plan = self.checked(changes)
        fields = plan.slots[0].stage.set
        if {*fields} & {*self.lacks}:
            raise StageError("the model cannot have it")
        needed = self.needs[plan.wrap] / (self.machines.nodes or 1)
        needed -= sum(self.saves[name] for name in self.saves if name in fields)
        needed -= {4: 0, 2: 2, 1: 4}[fields.get("micro", 4)]
        seconds = 4 * (4 / 3 if "again" in fields else 1) + 5 * (plan.wrap == "wrap.slow")
        return plan_of(needed, seconds=seconds)


def plan_of(device: float, *, seconds: float = 4.0, unknown: Sequence[str] = ()) -> Any:
    """Return a plan that needs the given GiB of a GPU with ROOM."""
    parts = {"compute": seconds}
    return SimpleNamespace(
        short=["memory"] if device > ROOM else [],
        roomy=device <= ROOMY,
        needed=device,
        estimate=SimpleNamespace(host_peak=0),
        time=StepTime(parts=parts, reached=parts, unknown=unknown, overlaps=True),
        idle=0,
    )


@pytest.fixture(autouse=True)
def planners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stages be their own planners."""
    found = SimpleNamespace(of=lambda plan: {step.slot: step.stage for step in plan.slots})
    monkeypatch.setattr(Planners, "installed", lambda: found)


@given(
    needs=st.integers(0, 40), saves=st.fixed_dictionaries(dict.fromkeys(SAVED, st.integers(0, 6)))
)
def test_what_is_saved_is_needed(needs: int, saves: Mapping[str, int]) -> None:
    base = Fake(needs={"": needs}, saves=saves)
    found = relaxed(search.most_saving(base, {}))
    too_much = needs - saves["again"] - saves["chunk"] - 4 - ROOM
    if not found.fits:
        assert too_much > max(saves["moments"], saves["frozen"])
        return
    fields = [one.what for one in found.saved]
    narrowed = [saves[name] for name in ("moments", "frozen") if name in fields]
    assert len(narrowed) == (too_much > 0)
    if not found.memory_plan.roomy:  # nothing that only costs time is left out, if it saves any
        assert {"smaller", *(name for name in ("again", "chunk") if saves[name])} <= {*fields}
        return
    assert not any(found.without(one).memory_plan.roomy for one in found.saved)
    # The most expensive saving is used only where all others are not enough.
    assert ("again" in fields) is (needs - ROOMY - sum(narrowed) > saves["chunk"] + 4)


@pytest.mark.parametrize(
    ("needs", "cannot", "expected"),
    [
        (9, {}, ""),
        (12, {}, "chunk"),
        (16, {}, "chunk smaller"),
        (10, {}, "chunk"),  # it fits without, and leaves nothing
        (17, {}, "chunk again"),
        (18, {}, "chunk smaller again"),
        (25, {}, "chunk smaller again moments"),
        (28, {}, "chunk smaller again frozen"),  # instead of moments, which are not enough
        (18, {"lacks": ["chunk"]}, "smaller again"),
        (18, {"refuses": ["chunk"]}, "smaller again"),
    ],
)
def test_what_costs_time_is_saved_before_what_is_computed(
    needs: int, cannot: dict[str, Any], expected: str
) -> None:
    base = Fake(needs={"": needs}, **cannot)
    assert " ".join(one.what for one in relaxed(search.most_saving(base, {})).saved) == expected
    assert not search.most_saving(base, {}, planner.AWAY).narrow


def test_what_saves_nothing_is_left_out() -> None:
    """Not even where there is no head-room."""
    few = dict.fromkeys(SAVED, 1) | {"again": 0}
    found = relaxed(search.most_saving(Fake(needs={"": 15}, saves=few), {}))
    assert (found.fits, found.memory_plan.roomy) == (True, False)
    assert "again" not in [one.what for one in found.saved]


def way(device: float, *saved: str, **how: Any) -> Candidate:
    base: Any = SimpleNamespace(memory_plan=lambda changes: plan_of(device, **how))
    return Candidate(
        base=base, start={}, saved=[Saving(order=ORDERS[one], what=one, fields={}) for one in saved]
    )


@pytest.mark.parametrize(
    ("ways", "chosen"),
    [
        ([way(11), way(9, "again")], 1),
        ([way(9, seconds=4.3), way(9, "again")], 0),
        ([way(9, seconds=4.5), way(9, "again")], 1),
        ([way(9, "again", seconds=9), way(9, "moments")], 0),
        ([way(10), way(9, "again", "chunk", seconds=9)], 1),  # head-room before time
        ([way(9), way(8, "again")], 1),  # as fast, and smaller
        ([way(9), way(8, "again", seconds=4.2)], 0),
        ([way(9, "frozen"), way(9, "chunk", "moments")], 1),
        ([way(9, seconds=9, unknown=["network"]), way(9, "chunk")], 0),
    ],
)
def test_the_best_way(ways: Sequence[Candidate], chosen: int) -> None:
    assert best(ways) is ways[chosen]
    assert best([way(11)]) is None


TIERS = {
    "ddp": Tier.REPLICATED, "hybrid": Tier.SHARDED_WITHIN_NODES, "fsdp": Tier.SHARDED,
    "slow": Tier.OFFLOADED, "disk": Tier.OFFLOADED_TO_DISK,
}  # fmt: skip
STRATEGIES = [
    Strategy(name=name, use=f"wrap.{name}", fields={}, what=name, order=order)
    for name, order in TIERS.items()
]


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ((9, 9, 1, 1), "ddp fsdp"),
        ((22, 9, 1, 1), "fsdp ddp"),  # before anything is recomputed
        ((50, 27, 1, 1), "fsdp ddp"),  # in fewer bits, before anything is offloaded
        ((50, 50, 9, 1), "slow ddp fsdp"),
        ((50, 50, 50, 9), "disk ddp fsdp slow"),
    ],
)
def test_the_strategy_that_gives_up_least(needs: Sequence[int], expected: str) -> None:
    needed = zip(("wrap.ddp", "wrap.fsdp", "wrap.slow", "wrap.disk"), needs, strict=True)
    base = Fake(needs=dict(needed), refuses=["wrap.hybrid"])
    tried, (refused,) = choose(base, STRATEGIES, "wrap")
    assert " ".join(one.strategy.name for one in tried) == expected
    assert refused == "hybrid: wrap: no wrap.hybrid"


@pytest.mark.parametrize(("needs", "nodes"), [(30, 2), (100, 8), (22 * 512, 512), (22 * 513, None)])
def test_the_fewest_nodes_with_what_costs_time_alone(needs: int, nodes: int | None) -> None:
    node = Topology(ranks=8, local_ranks=8, device="cuda")
    found = search.on_more_nodes(Fake(needs={"": needs}), node, {})
    assert (found and found.base.machines.nodes) == nodes


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
    assert " ".join(one.name for one in suited(STRATEGIES, topology)) == names


DIVIDED = [
    *STRATEGIES[:3],
    *(
        Strategy(
            name=f"cp{size}", use=f"wrap.cp{size}", what="shared", order=Tier.DIVIDED,
            axes={"context": size},
        )
        for size in (2, 4, 8)
    ),
    *STRATEGIES[3:],
]  # fmt: skip


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ((30, 22, 1, 1, 1), "fsdp ddp"),  # data parallelism suffices
        ((50, 27, 40, 22, 1), "cp4 ddp fsdp cp2"),  # before anything has fewer bits
        ((50, 27, 40, 40, 40), "fsdp ddp"),
    ],
)
def test_samples_are_shared_where_data_parallelism_does_not_fit(
    needs: Sequence[int], expected: str
) -> None:
    uses = ("wrap.ddp", "wrap.fsdp", "wrap.cp2", "wrap.cp4", "wrap.cp8")
    base = Fake(needs=dict(zip(uses, needs, strict=True)), refuses=["wrap.hybrid"])
    tried, _ = choose(base, DIVIDED, "wrap")
    assert " ".join(one.strategy.name for one in tried) == expected


def test_axes_that_the_ranks_allow() -> None:
    axes = (
        {"tensor": 4},
        {"tensor": 8},
        {"context": 8},
        {"context": 16},
        {"tensor": 4, "pipeline": 2},
    )
    offered = [
        Strategy(name=str(number), use="wrap.x", order=Tier.DIVIDED, axes=one)
        for number, one in enumerate(axes)
    ]
    topology = Topology(ranks=8, local_ranks=4, device="cuda")
    assert " ".join(one.name for one in suited(offered, topology)) == "0 2 4"
