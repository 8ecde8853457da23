"""The coordinator of several nodes, with a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.distributed.settings import Attempts, Restarts
from pipeline.launch.coordinator import (
    FIRST_CALL_SECONDS,
    GATHER_SECONDS,
    LAST_CALL_SECONDS,
    LOST_SECONDS,
    Coordinator,
)
from pipeline.launch.messages import Beat, Over, Reply, Report
from tests.support.tier import examples

DIED = Report(kind="died", text="rank 1 was killed", restart="always", time=5.0)
RAISED = Report(kind="raised", text="connection closed", restart="after progress", time=4.0)


class Nodes:
    """Nodes that beat every second, and a coordinator."""

    def __init__(self, fewest: int = 2, most: int = 2, **settings: Any) -> None:
        self.now, self.obedient = 100.0, False
        self.coordinator = Coordinator(
            fewest=fewest,
            most=most,
            attempts=Attempts(Restarts(**{"limit": 2, "backoff": 1.0, **settings})),
            rendezvous_seconds=120,
            run="a",
            spec="{}",
        )
        self.states: dict[int, dict[str, Any]] = {}
        self.replies: dict[int, Reply] = {}

    def start(self, *nodes: int, **state: Any) -> None:
        for node in nodes:
            self.states[node] = {"agent": f"agent-{node}-{self.now}", **state}

    def say(self, node: int, **state: Any) -> None:
        self.states[node] |= state

    def run(self, seconds: float) -> None:
        """Let time pass; each node does as it is told."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            self.coordinator.tick(self.now)
            for node, state in self.states.items():
                if not state.get("silent"):
                    self._beat(node, state)

    def _beat(self, node: int, state: dict[str, Any]) -> None:
        told = {k: v for k, v in state.items() if k not in ("silent", "address")}
        known = {"run": "a", "node": node, "host": f"h{node}", "procs": 2, "port": 9000 + node}
        beat = Beat(**{**known, **told})
        reply = self.coordinator.beat(beat, state.get("address", f"10.0.0.{node}"), self.now)
        self.replies[node] = reply
        if reply.place is None:
            state |= {"round": 0, "report": None}
        elif state.get("round") != reply.round:
            state |= {"round": reply.round, "report": None, "landmarks": 0}
        elif reply.stop and self.obedient and state.get("report") is None:
            state["report"] = Report(kind="stopped")

    @property
    def over(self) -> Over | None:
        return self.coordinator.over

    def places(self) -> list[tuple[int, int] | None]:
        """Return first rank and world size of each node."""
        found = [self.replies[node].place for node in sorted(self.replies)]
        return [place and (place.first_rank, place.world_size) for place in found]


def test_a_run_of_two_nodes() -> None:
    nodes = Nodes()
    nodes.start(0)
    nodes.run(5)
    assert nodes.places() == [None]
    nodes.start(1)
    nodes.run(2)
    assert nodes.places() == [(0, 4), (2, 4)]
    place = nodes.replies[1].place
    assert place is not None
    assert (place.master, place.port) == ("10.0.0.0", 9000)
    nodes.say(0, report=Report(kind="finished"))
    nodes.run(3)
    assert nodes.over is None
    nodes.say(1, report=Report(kind="finished"))
    nodes.run(2)
    assert nodes.over == Over(kind="finished")
    assert nodes.coordinator.known_by_all()


def test_a_rank_that_died_is_the_cause_and_all_start_again() -> None:
    nodes = Nodes()
    nodes.start(0, 1)
    nodes.run(2)
    nodes.say(0, report=RAISED)
    nodes.run(GATHER_SECONDS - 1)
    nodes.say(1, report=DIED)
    nodes.run(1)
    assert nodes.places() == [None, None]
    assert [note[:2] for note in nodes.coordinator.notes] == [("rank 1 was killed", 1)]
    nodes.run(3)
    assert nodes.replies[0].round == 2
    assert nodes.places() == [(0, 4), (2, 4)]


def test_restarts_without_progress_are_counted() -> None:
    nodes = Nodes()
    nodes.start(0, 1)
    for number in (1, 2):
        nodes.run(5)
        nodes.say(1, report=DIED)
        nodes.run(4)
        assert nodes.coordinator.notes[-1].number == number
    nodes.run(5)
    nodes.say(0, landmarks=1)
    nodes.say(1, report=DIED)
    nodes.run(4)
    assert nodes.coordinator.notes[-1].number == 1
    for _ in range(2):
        nodes.run(5)
        nodes.say(1, report=DIED)
        nodes.run(4)
    assert nodes.over == Over(kind="failed", text="rank 1 was killed")


def test_an_error_that_a_person_has_to_act_on_ends_the_run() -> None:
    nodes = Nodes()
    nodes.start(0, 1)
    nodes.run(2)
    nodes.say(1, report=Report(kind="raised", text="disk full", restart="never"), landmarks=3)
    nodes.run(4)
    assert nodes.over == Over(kind="failed", text="disk full")


def test_a_node_that_is_lost_and_comes_back() -> None:
    nodes = Nodes()
    nodes.start(0, 1)
    nodes.run(2)
    nodes.say(1, silent=True)
    nodes.run(LOST_SECONDS + GATHER_SECONDS + 2)
    assert nodes.places()[0] is None
    text = nodes.coordinator.notes[0].text
    assert text == "node 1 (h1, 10.0.0.1) was lost: no sign of life for 10 s"
    nodes.run(30)
    nodes.say(1, silent=False)
    nodes.run(3)
    assert nodes.places() == [(0, 4), (2, 4)]


@pytest.mark.parametrize("before", [0.0, 3.0])
def test_the_error_of_a_rank_whose_node_is_lost_waits_for_that_verdict(before: float) -> None:
    """The broken connection is seen at once on the node that is left, its cause later."""
    nodes = Nodes(fewest=1)
    nodes.start(0, 1)
    nodes.coordinator.own = nodes.states[0]["agent"]
    nodes.run(2)
    nodes.say(1, silent=True)
    nodes.run(before)
    nodes.say(0, report=RAISED)
    nodes.run(LOST_SECONDS - 2 - before)
    assert nodes.over is None
    assert nodes.coordinator.notes == []
    nodes.run(3)
    assert nodes.over is None
    (note,) = nodes.coordinator.notes
    assert note.text == "node 1 (h1, 10.0.0.1) was lost: no sign of life for 10 s"
    nodes.run(LAST_CALL_SECONDS + 3)
    assert nodes.replies[0].place is not None
    assert nodes.replies[0].place.world_size == 2


def test_the_error_of_a_rank_ends_the_run_soon_while_all_nodes_beat() -> None:
    nodes = Nodes()
    nodes.start(0, 1)
    nodes.run(2)
    nodes.say(0, report=RAISED)
    nodes.run(GATHER_SECONDS + 1)
    assert nodes.over == Over(kind="failed", text="connection closed")


def test_too_few_nodes() -> None:
    nodes = Nodes()
    nodes.start(0)
    nodes.run(125)
    assert nodes.over is not None
    assert nodes.over.text.startswith("1 of at least 2 nodes were there within 120 s: node 0 (h0,")


def test_an_elastic_run_goes_on_with_the_nodes_that_are_left_and_grows_again() -> None:
    nodes = Nodes(fewest=1, most=3)
    nodes.start(0, 1)
    nodes.run(FIRST_CALL_SECONDS - 5)
    assert nodes.places() == [None, None]
    nodes.run(10)
    assert nodes.places() == [(0, 4), (2, 4)]
    nodes.say(1, silent=True)
    nodes.run(LOST_SECONDS + GATHER_SECONDS + LAST_CALL_SECONDS + 3)
    assert nodes.places()[0] == (0, 2)
    nodes.start(1)
    nodes.run(2)
    assert nodes.replies[0].stop
    nodes.say(0, report=Report(kind="stopped"))
    nodes.run(LAST_CALL_SECONDS + 3)
    assert nodes.places() == [(0, 4), (2, 4)]
    assert nodes.over is None


def test_a_stop_reaches_all() -> None:
    nodes = Nodes()
    nodes.start(0, 1)
    nodes.run(2)
    nodes.say(1, stopping="SIGTERM")
    nodes.run(1)
    assert nodes.replies[0].stop
    nodes.say(1, report=Report(kind="stopped"))
    nodes.run(1)
    nodes.say(0, report=RAISED)  # it has lost its peer
    nodes.run(3)
    assert nodes.over == Over(kind="stopped", text="SIGTERM to node 1 (h1, 10.0.0.1)")


def test_a_coordinator_that_was_frozen_blames_nobody() -> None:
    nodes = Nodes()
    nodes.start(0, 1)
    nodes.run(2)
    nodes.now += 300
    nodes.run(3)
    assert nodes.places() == [(0, 4), (2, 4)]
    assert nodes.coordinator.notes == []


def test_an_agent_that_is_started_again_replaces_the_one_before() -> None:
    nodes = Nodes()
    nodes.start(0, 1)
    nodes.run(2)
    old = nodes.states[1]
    nodes.start(1)
    nodes.run(GATHER_SECONDS + LAST_CALL_SECONDS + 3)
    assert nodes.places() == [(0, 4), (2, 4)]
    assert nodes.replies[1].round == 2
    nodes.states = {0: nodes.states[0], 1: old}
    nodes.run(1)
    over = nodes.replies[1].over
    assert over is not None
    assert over.text.startswith("another process was started for node rank 1")


def test_a_lost_node_may_come_back_on_another_machine() -> None:
    nodes = Nodes()
    nodes.start(0, 1)
    nodes.run(2)
    nodes.say(1, silent=True)
    nodes.run(LOST_SECONDS + GATHER_SECONDS + 3)
    nodes.start(1, address="10.0.0.9")
    nodes.run(LAST_CALL_SECONDS)
    assert nodes.places() == [(0, 4), (2, 4)]
    assert nodes.replies[0].round == 2


def test_nodes_that_are_lost_do_not_say_how_many_ranks_there_are() -> None:
    nodes = Nodes()
    nodes.start(1, procs=4)
    nodes.run(2)
    nodes.say(1, silent=True)
    nodes.run(LOST_SECONDS + 1)
    nodes.start(0, 1)
    nodes.run(2)
    assert nodes.places() == [(0, 4), (2, 4)]


def test_who_is_refused_replaces_nobody() -> None:
    nodes = Nodes()
    nodes.start(0, 1)
    nodes.run(2)
    wrong = Beat(agent="x", run="a", node=1, host="h1", procs=4, port=1)
    assert nodes.coordinator.beat(wrong, "10.0.0.1", nodes.now).over is not None
    nodes.run(LOST_SECONDS + 5)
    assert nodes.places() == [(0, 4), (2, 4)]
    assert nodes.coordinator.notes == []


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"address": "10.0.0.9"}, "node rank 1 is taken by h1 (10.0.0.1)"),
        ({"run": "b"}, "node 0 runs a there, and this node b"),
        ({"procs": 4}, "h1 has 4 processes, but the other nodes have 2: all need the same number"),
    ],
)
def test_nodes_that_do_not_fit(state: dict[str, Any], words: str) -> None:
    nodes = Nodes(most=3)
    nodes.start(0, 1)
    nodes.run(2)
    beat = {"agent": "x", "run": "a", "node": 1, "host": "h1", "procs": 2, "port": 1}
    address = state.pop("address", "10.0.0.1")
    reply = nodes.coordinator.beat(Beat(**(beat | state)), address, nodes.now)
    assert reply.over is not None
    assert words in reply.over.text
    assert nodes.over is None


EVENTS = st.tuples(st.sampled_from(["die", "raise", "silence", "back", "again", "wait"]),
                   st.integers(0, 2))  # fmt: skip


@examples(60)
@given(st.lists(EVENTS, max_size=12))
def test_whatever_happens_ranks_are_never_in_two_worlds(events: list[tuple[str, int]]) -> None:
    """All members of a round see the same world, and the run either goes on or has ended."""
    nodes = Nodes(fewest=1, most=3, limit=100)
    nodes.obedient = True
    nodes.start(0, 1, 2)
    nodes.run(2)
    for event, node in events:
        changes = {
            "die": {"report": DIED}, "raise": {"report": RAISED}, "silence": {"silent": True},
            "back": {"silent": False}, "wait": {},
        }  # fmt: skip
        if event == "again":
            nodes.start(node)
        else:
            nodes.say(node, **changes[event])
        nodes.run(4)
        alive = [n for n, state in nodes.states.items() if not state.get("silent")]
        places = [nodes.replies[n].place for n in alive]
        worlds = {(nodes.replies[n].round, p.world_size, p.master) for n, p in zip(alive, places,
                  strict=True) if p}  # fmt: skip
        assert len(worlds) <= 1
        firsts = [place.first_rank for place in places if place]
        assert len(firsts) == len(set(firsts))
    for node in nodes.states:
        nodes.say(node, silent=False)
    nodes.run(200)
    assert nodes.over is not None or all(nodes.places())


def test_the_limit_of_a_lost_node_is_the_recipes() -> None:
    nodes = Nodes()
    nodes.coordinator.lost_seconds = 40
    nodes.start(0, 1)
    nodes.run(2)
    nodes.say(1, silent=True)
    nodes.run(39)
    assert nodes.replies[0].place is not None
    assert nodes.replies[0].lost_seconds == 40
    nodes.run(5)
    assert (
        nodes.coordinator.notes[0].text
        == "node 1 (h1, 10.0.0.1) was lost: no sign of life for 40 s"
    )


def test_node_0_is_not_lost_to_itself() -> None:
    """Its beats come late on a loaded machine, where its coordinator lives too."""
    nodes = Nodes()
    nodes.start(0, 1)
    nodes.coordinator.own = nodes.states[0]["agent"]
    nodes.run(2)
    nodes.say(0, silent=True)
    nodes.run(5 * LOST_SECONDS)
    assert nodes.replies[1].place is not None
    assert nodes.coordinator.notes == []
