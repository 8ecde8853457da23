"""Which way `pipe advise` takes, and which remedies `pipe plan` tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline.forecast.advice import Tried, Walk, of_each
from pipeline.forecast.advising import Advice, Task, _head, _nodes
from pipeline.forecast.options import CHUNK, RECOMPUTE, SMALLER, Order, Saving
from pipeline.forecast.sparing import Change, Way, best, folded, ways
from pipeline.forecast.timing import StepTime

from pipeline.errors import StageError
from pipeline.presets import Strategy

ROOM = 10


@dataclass(frozen=True)
class Stage:
    """One that can compute again, chunk, and take smaller micro-batches, from what is set."""

    set: dict[str, Any]

    def savings(self, ranks: int) -> Iterator[Saving]:
        if "again" not in self.set:
            yield Saving(order=RECOMPUTE, what="again", fields={"again": True})
        if "chunk" not in self.set:
            yield Saving(order=CHUNK, what="chunk", fields={"chunk": True})
        if self.set.get("micro", 4) > 1:
            yield Saving(
                order=SMALLER, what="less", fields={"micro": self.set.get("micro", 4) // 2}
            )


def drawn(changes: Sequence[Change], needs: dict[str, int], *, unknown: Sequence[str] = ()) -> Any:
    """Needs of memory by strategy, less 5 for what is computed again, 3 for chunks, 2 for each
    halving; 4 seconds, a third more where something is computed again."""
    fields = {one.path.partition(".")[2]: one.value for one in changes if "." in one.path}
    wrap = next((one.value["use"] for one in changes if one.path == "wrap"), "")
    needed = needs[wrap] - 5 * ("again" in fields) - 3 * ("chunk" in fields)
    needed -= {4: 0, 2: 2, 1: 4}[fields.get("micro", 4)]
    slow = {"wrap.slow": 9.0}.get(wrap, 0.0)
    time = StepTime(
        parts={"compute": 4 * (4 / 3 if "again" in fields else 1) + slow}, unknown=unknown
    )
    step = SimpleNamespace(slot="train", stage=Stage(fields))
    return SimpleNamespace(
        plan=SimpleNamespace(steps=[step]),
        site=SimpleNamespace(ranks=8, device="cuda"),
        hardware=SimpleNamespace(device_memory=ROOM),
        margins=SimpleNamespace(of=lambda tensors: tensors),
        forecast=SimpleNamespace(
            device={"load": SimpleNamespace(bytes=1), "backward": SimpleNamespace(bytes=needed)}
        ),
        short=["short"] if needed > ROOM else [],
        time=time,
    )


def fields_of(changes: Sequence[Change]) -> dict[str, Any]:
    return {one.path: one.value for one in changes if "." in one.path}


def test_a_saving_that_a_model_cannot_have_is_left_out() -> None:
    def draw(changes: Sequence[Change]) -> Any:
        if "train.chunk" in fields_of(changes):
            raise StageError("logits are capped")
        return drawn(changes, {"": 16})

    found = list(ways([], draw))
    assert [fields_of(way.changes) for way in found] == [
        {},
        {"train.again": True},
        {"train.again": True, "train.micro": 2},
        {"train.micro": 2},
        {"train.micro": 1},
    ]


def test_what_costs_a_third_is_given_up_when_smaller_micro_batches_do() -> None:
    def draw(changes: Sequence[Change]) -> Any:
        return drawn(changes, {"": 17})

    found = list(ways([], draw))
    assert [fields_of(way.changes) for way in found] == [
        {},
        {"train.again": True},
        {"train.again": True, "train.chunk": True},
        {"train.chunk": True},
        {"train.chunk": True, "train.micro": 2},
        {"train.chunk": True, "train.micro": 1},
        {"train.again": True, "train.micro": 2},
    ]
    chosen = best(found)
    assert chosen is not None
    assert fields_of(chosen.changes) == {"train.chunk": True, "train.micro": 1}


@pytest.mark.parametrize(("slower", "first"), [(1.09, True), (1.11, False)])
def test_of_ways_that_take_as_long_the_first_is_taken(slower: float, first: bool) -> None:
    fine = [drawn([], {"": 1}) for _ in range(2)]
    fine[0].time = StepTime(parts={"compute": 4 * slower}, unknown=())
    found = [Way(changes=[], saved=(), drawn=one) for one in fine]
    assert best(found) is found[0 if first else 1]


@pytest.mark.parametrize(
    ("needs", "slower", "first"), [(2, 1.01, False), (2, 0.99, True), (1, 1.01, True)]
)
def test_a_way_that_is_beaten_in_everything_is_not_taken(
    needs: int, slower: float, first: bool
) -> None:
    fine = [drawn([], {"": needs}), drawn([], {"": 1})]
    fine[0].time = StepTime(parts={"compute": 4 * slower}, unknown=())
    saving = Saving(order=RECOMPUTE, what="again", fields={"again": True})
    found = [
        Way(changes=[], saved=saved, drawn=one)
        for saved, one in zip(((saving,), ()), fine, strict=True)
    ]
    assert best(found) is found[0 if first else 1]


def test_without_rates_the_fewest_savings_are_taken() -> None:
    def draw(changes: Sequence[Change]) -> Any:
        return drawn(changes, {"": 17}, unknown=["network"])

    chosen = best(list(ways([], draw)))
    assert chosen is not None
    assert fields_of(chosen.changes) == {"train.again": True, "train.chunk": True}


def test_the_same_is_not_drawn_twice() -> None:
    seen = []

    def draw(changes: Sequence[Change]) -> Any:
        seen.append(tuple(change.override for change in changes))
        return drawn(changes, {"": 17})

    list(ways([], draw))
    assert len(seen) == len(set(seen)) == 7


def test_nothing_is_saved_where_the_model_itself_is_too_large() -> None:
    def draw(changes: Sequence[Change]) -> Any:
        large = drawn(changes, {"": 17})
        large.forecast.device["load"].bytes = ROOM + 1
        return large

    assert len(list(ways([], draw))) == 1


def strategy(name: str, order: int) -> Strategy:
    return Strategy(name=name, use=f"wrap.{name}", fields={}, what=name, order=order)


def walk(needs: dict[str, int], nodes: int, ranks: int, *strategies: Strategy) -> Walk:
    def draw(changes: Sequence[Change]) -> Any:
        return drawn(changes, needs)

    return Walk(draw=draw, strategies=strategies, nodes=nodes, ranks=ranks)


DDP, FSDP = strategy("ddp", Order.REPLICATED), strategy("fsdp", Order.SHARDED)
HYBRID = strategy("hybrid", Order.SHARDED_WITHIN_NODES)
SLOW, DISK = strategy("slow", Order.OFFLOADED), strategy("disk", Order.OFFLOADED_TO_DISK)
NEEDS = {"wrap.ddp": 22, "wrap.fsdp": 9, "wrap.hybrid": 9, "wrap.slow": 1, "wrap.disk": 1}


def test_sharding_goes_before_computing_again() -> None:
    made = walk(NEEDS, 1, 8, DDP, FSDP, SLOW)
    chosen = made.run()
    assert chosen is not None
    assert chosen.strategy is FSDP
    assert chosen.way.saved == ()
    assert {tried.strategy.name for tried in made.tried} == {"ddp", "fsdp"}


def test_one_gpu_is_not_sharded() -> None:
    chosen = walk({**NEEDS, "wrap.ddp": 15}, 1, 1, DDP, HYBRID, FSDP, SLOW).run()
    assert chosen is not None
    assert chosen.strategy is DDP
    assert fields_of(chosen.way.changes) == {"train.chunk": True, "train.micro": 2}


@pytest.mark.parametrize(("nodes", "ranks", "tried"), [(1, 8, False), (4, 4, False), (2, 16, True)])
def test_within_nodes_only_where_it_differs(nodes: int, ranks: int, tried: bool) -> None:
    made = walk(NEEDS, nodes, ranks, DDP, HYBRID, FSDP)
    made.run()
    assert any(one.strategy is HYBRID for one in made.tried) is tried


def test_offloading_comes_after_all_savings_and_one_at_a_time() -> None:
    needs = {"wrap.ddp": 50, "wrap.fsdp": 23, "wrap.slow": 9, "wrap.disk": 1}
    made = walk(needs, 1, 8, DDP, FSDP, SLOW, DISK)
    chosen = made.run()
    assert chosen is not None
    assert chosen.strategy is SLOW
    assert "disk" not in {tried.strategy.name for tried in made.tried}
    assert walk({**needs, "wrap.fsdp": 22}, 1, 8, DDP, FSDP, SLOW, DISK).run().strategy is FSDP  # type: ignore[union-attr]


def test_a_strategy_that_cannot_tell_what_it_needs_is_refused() -> None:
    mute = replace(FSDP, foretold=False)
    made = walk({"wrap.ddp": 1}, 1, 8, DDP, mute)
    chosen = made.run()
    assert chosen is not None
    assert chosen.strategy is DDP
    assert made.refused == ["fsdp: wrap.fsdp has no forecast"]


def test_what_was_saved_is_told_as_it_would_be_typed() -> None:
    made = walk({"wrap.ddp": 15}, 1, 1, DDP)
    made.run()
    assert [tried.what for tried in made.tried] == [
        "ddp: ddp",
        "ddp with train.again=true",
        "ddp with train.chunk=true",
        "ddp with train.chunk=true train.micro=2",
    ]


def test_what_saves_nothing_is_tried_and_not_kept() -> None:
    def draw(changes: Sequence[Change]) -> Any:
        made = drawn(changes, {"": 16})
        if "train.again" in fields_of(changes):  # which makes nothing lower here
            made.forecast.device["backward"].bytes += 5
            made.short = ["short"] if made.forecast.device["backward"].bytes > ROOM else []
        return made

    found = list(ways([], draw))
    assert fields_of(found[1].changes) == {"train.again": True}
    chosen = best(found)
    assert chosen is not None
    assert fields_of(chosen.changes) == {"train.chunk": True, "train.micro": 1}


def test_a_saving_that_changes_nothing_ends_the_search() -> None:
    class Stuck:
        def savings(self, ranks: int) -> Iterator[Saving]:
            yield Saving(order=CHUNK, what="again and again", fields={"chunk": True})

    def draw(changes: Sequence[Change]) -> Any:
        made = drawn(changes, {"": 17})
        made.plan.steps[0].stage = Stuck()
        return made

    assert len(list(ways([], draw))) == 2


def test_each_strategy_is_told_once_by_its_best_way() -> None:
    made = walk({**NEEDS, "wrap.ddp": 50}, 1, 8, DDP, FSDP)
    made.run()
    assert [one.what for one in of_each(made.tried)] == [
        "ddp with train.again=true train.chunk=true train.micro=1",
        "fsdp: fsdp",
    ]


def test_fields_of_a_changed_slot_are_said_in_it() -> None:
    slot = Change(path="wrap", value={"use": "wrap.x", "late": True}, why="")
    field = Change(path="wrap.late", value=False, why="")
    other = Change(path="train.chunk", value=1, why="")
    assert [one.override for one in folded([slot, field, other])] == [
        'wrap={"use": "wrap.x", "late": false}',
        "train.chunk=1",
    ]


def tried(named: Strategy, device: int, host: int, *short: str, there: int | None = None) -> Tried:
    """One that needs so many GiB of a GPU and of a host, and is short of something."""
    made: Any = SimpleNamespace(
        site=SimpleNamespace(device="cuda"),
        forecast=SimpleNamespace(
            peak=device << 30,
            host_peak=host << 30,
            device={"load": SimpleNamespace(bytes=device << 30)},
        ),
        hardware=SimpleNamespace(device_memory=8 << 30, host_memory=there),
        margins=SimpleNamespace(of=lambda tensors: tensors),
        short=[SimpleNamespace(place=place) for place in short],
        time=None,
        idle=0,
    )
    return Tried(strategy=named, way=Way(changes=[], saved=(), drawn=made))


def test_a_host_that_is_not_known_is_a_condition() -> None:
    assert tried(SLOW, 2, 3).told() == "2.0 GiB of 8.0 a GPU, if a host has 3.0 GiB"
    told = tried(SLOW, 2, 3, there=4 << 30).told()
    assert told == "2.0 GiB of 8.0 a GPU, 3.0 GiB of 4.0 a host"


def test_hosts_that_are_too_small_are_named() -> None:
    def missing(*found: Tried) -> str:
        return Advice(draft=None, chosen=None, tried=found, refused=(), nodes_needed=None).missing

    gpus = tried(FSDP, 9, 1, "device", "host")
    assert "GPUs" in missing(gpus)
    told = missing(gpus, tried(DISK, 1, 5, "host"), tried(SLOW, 1, 4, "host"))
    assert told == "4.0 GiB of host memory a node for slow, or more nodes"


def test_rejected_ways_are_told_with_their_numbers() -> None:
    task = Task(
        name="mine", model={"path": "there"}, data=Path(), lora=False, sequence=1,
        global_batch=None, micro_batch=None, compute="bf16",
    )  # fmt: skip
    chosen = tried(FSDP, 7, 1)
    assert _head(task, [tried(DDP, 9, 1, "device"), chosen, tried(HYBRID, 8, 1)], chosen) == [
        "mine: all weights of there.",
        "",
        "Chosen: fsdp: fsdp: 7.0 GiB of 8.0 a GPU, if a host has 1.0 GiB.",
        "",
        "Needs too much:",
        "  ddp: ddp: 9.0 GiB of 8.0 a GPU, if a host has 1.0 GiB",
        "",
        "Fits too:",
        "  hybrid: hybrid: 8.0 GiB of 8.0 a GPU, if a host has 1.0 GiB",
    ]


@pytest.mark.parametrize(("batch", "fewest"), [(4096, 4), (8, None)])
def test_nodes_that_get_no_sample_are_no_help(batch: int, fewest: int | None) -> None:
    def draw(nodes: int, changes: Sequence[Change]) -> Any:
        made = drawn(changes, {"wrap.fsdp": 80 // nodes})
        made.idle = max(8 * nodes - batch, 0)
        return made

    assert _nodes(walk({}, 1, 8, DDP, FSDP, SLOW), draw) == fewest
