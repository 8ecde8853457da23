"""Rounds of several nodes, with a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.distributed.settings import Attempts, Restarts, Timeouts
from pipeline.launch.rounds import GATHER_SECONDS, End, Greeting, Orders, Rounds, State
from tests.support.tier import examples

DIED = End(kind="died", text="rank 1 was killed", restart="always", time=5.0)
RAISED = End(kind="raised", text="connection closed", restart="after progress", time=4.0)
LOST = Timeouts().node


class Nodes:
    """Nodes that write their states twice a second, and do as they are ordered."""

    def __init__(self, nodes: int = 2, node_seconds: float = LOST, **settings: Any) -> None:
        self.now, self.number, self.obedient = 100.0, 0, False
        self.rounds = Rounds(
            nodes=nodes, procs=2,
            attempts=Attempts(Restarts(**{"limit": 2, "backoff": 1.0, **settings})),
            timeouts=Timeouts(rendezvous=120, node=node_seconds),
        )  # fmt: skip
        self.states: dict[int, State] = {}
        self.silent: set[int] = set()
        self.greetings: dict[str, Greeting | None] = {}
        self.orders = Orders(session="")

    def start(self, *nodes: int, **state: Any) -> None:
        """Start the process of each node, again where there is one."""
        for node in nodes:
            self.silent.discard(node)
            known = {"host": f"h{node}", "address": f"10.0.0.{node}", "procs": 2}
            self.states[node] = State(agent=f"agent-{node}-{self.now}", **{**known, **state})

    def say(self, node: int, **state: Any) -> None:
        self.states[node] = replace(self.states[node], **state)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for node, state in self.states.items():
                if node not in self.silent:
                    self._write(node, state)
            self.orders = self.rounds.decide(self.now)

    def _write(self, node: int, state: State) -> None:
        self.number += 1
        greeted = self.greetings.get(state.agent)
        if greeted is None or greeted.refusal:
            self.say(node, session=self.rounds.orders.session)
            greeting = self.rounds.greet(node, self.states[node], self.now)
            self.greetings[state.agent] = greeting
        orders = self.orders
        if not orders.runs:
            self.say(node, round=0, end=None)
        elif state.round != orders.round:
            self.say(node, round=orders.round, end=None, landmarks=0)
        elif orders.stop and self.obedient and state.end is None:
            self.say(node, end=End(kind="stopped"))
        self.rounds.note(node, replace(self.states[node], number=self.number), self.now)

    @property
    def runs(self) -> int:
        """The round that runs; 0 between rounds."""
        return self.orders.round if self.orders.runs else 0

    @property
    def over(self) -> End | None:
        return self.orders.over


@pytest.fixture
def nodes() -> Nodes:
    """Two nodes in their first round."""
    made = Nodes()
    made.start(0, 1)
    made.run(2)
    assert made.runs == 1
    return made


def test_a_run_of_two_nodes() -> None:
    nodes = Nodes()
    nodes.start(0)
    nodes.run(5)
    assert nodes.runs == 0
    nodes.start(1)
    nodes.run(2)
    assert nodes.runs == 1
    nodes.say(0, end=End(kind="finished"))
    nodes.run(3)
    assert nodes.over is None
    nodes.say(1, end=End(kind="finished"))
    nodes.run(2)
    assert nodes.over == End(kind="finished")
    assert not nodes.rounds.known_by_all()
    nodes.say(1, knows=True)
    nodes.run(1)
    assert nodes.rounds.known_by_all(fewest=1)


def test_a_rank_that_died_is_the_cause_and_all_start_again(nodes: Nodes) -> None:
    nodes.say(0, end=RAISED)
    nodes.run(GATHER_SECONDS - 1)
    nodes.say(1, end=DIED)
    nodes.run(1)
    assert nodes.runs == 0
    assert (nodes.orders.failure, nodes.orders.restart) == ("rank 1 was killed", 1)
    nodes.run(3)
    assert nodes.runs == 2


def test_restarts_without_progress_are_counted(nodes: Nodes) -> None:
    for number in (1, 2):
        nodes.run(5)
        nodes.say(1, end=DIED)
        nodes.run(4)
        assert nodes.orders.restart == number
    nodes.run(5)
    nodes.say(0, landmarks=1)
    nodes.say(1, end=DIED)
    nodes.run(4)
    assert nodes.orders.restart == 1
    for _ in range(2):
        nodes.run(5)
        nodes.say(1, end=DIED)
        nodes.run(4)
    assert nodes.over == DIED


def test_an_error_that_a_person_has_to_act_on_ends_the_run(nodes: Nodes) -> None:
    full = End(kind="raised", text="disk full", restart="never")
    nodes.say(1, end=full, landmarks=3)
    nodes.run(4)
    assert nodes.over == full


@pytest.mark.parametrize("seconds", [LOST, 40.0])
def test_a_node_that_is_lost_and_comes_back(seconds: float) -> None:
    nodes = Nodes(node_seconds=seconds)
    nodes.start(0, 1)
    nodes.run(2)
    assert nodes.orders.lost_seconds == seconds
    nodes.silent.add(1)
    nodes.run(seconds - 1)
    assert nodes.runs == 1
    nodes.run(GATHER_SECONDS + 3)
    assert nodes.runs == 0
    text = nodes.orders.failure
    assert text == f"node 1 (h1, 10.0.0.1) was lost: no sign of life for {seconds:g} s"
    nodes.run(30)
    assert nodes.runs == 0
    nodes.silent.clear()
    nodes.run(3)
    assert nodes.runs == 2


def test_a_node_that_stays_away_ends_the_run_with_its_name(nodes: Nodes) -> None:
    nodes.silent.add(1)
    nodes.run(LOST + GATHER_SECONDS + 125)
    assert nodes.over is not None
    assert nodes.over.text.startswith(
        "not all of 2 nodes were there within 120 s: without node 1 (h1, 10.0.0.1)\n"
    )


@pytest.mark.parametrize("before", [0.0, 3.0])
def test_the_error_of_a_rank_whose_node_is_lost_waits_for_that_verdict(
    nodes: Nodes, before: float
) -> None:
    """The broken connection is seen at once on the node that is left, its cause later."""
    nodes.silent.add(1)
    nodes.run(before)
    nodes.say(0, end=RAISED)
    nodes.run(LOST - 2 - before)
    assert (nodes.over, nodes.orders.failure) == (None, "")
    nodes.run(3)
    assert nodes.over is None
    assert nodes.orders.failure == "node 1 (h1, 10.0.0.1) was lost: no sign of life for 10 s"


def test_the_error_of_a_rank_ends_the_run_soon_while_all_nodes_write(nodes: Nodes) -> None:
    nodes.say(0, end=RAISED)
    nodes.run(GATHER_SECONDS + 1)
    assert nodes.over == RAISED


def test_too_few_nodes() -> None:
    nodes = Nodes()
    nodes.start(0)
    nodes.run(125)
    assert nodes.over is not None
    assert nodes.over.text.startswith(
        "not all of 2 nodes were there within 120 s: without node 1\n"
    )


def test_a_stop_reaches_all(nodes: Nodes) -> None:
    nodes.say(1, end=End(kind="stopped", text="SIGTERM"))
    nodes.run(1)
    assert nodes.orders.stop
    nodes.say(0, end=RAISED)  # it has lost its peer
    nodes.run(3)
    assert nodes.over == End(kind="stopped", text="SIGTERM to node 1 (h1, 10.0.0.1)")


def test_a_node_0_that_was_frozen_blames_nobody(nodes: Nodes) -> None:
    nodes.now += 300
    nodes.run(3)
    assert (nodes.runs, nodes.orders.failure) == (1, "")


def test_node_0_is_not_lost_to_itself(nodes: Nodes) -> None:
    """Its states come late on a loaded machine, where its decisions are made too."""
    nodes.silent.add(0)
    nodes.run(5 * LOST)
    assert (nodes.runs, nodes.orders.failure) == (1, "")


def test_a_process_that_is_started_again_waits_until_the_one_before_is_lost(nodes: Nodes) -> None:
    nodes.start(1)
    nodes.run(LOST - 2)
    assert nodes.greetings[nodes.states[1].agent] is None
    nodes.run(GATHER_SECONDS + 6)
    assert nodes.orders.failure.startswith("node 1 (h1, 10.0.0.1) was lost")
    assert nodes.runs == 2


def test_a_lost_node_may_come_back_on_another_machine(nodes: Nodes) -> None:
    nodes.silent.add(1)
    nodes.run(LOST + GATHER_SECONDS + 3)
    nodes.start(1, host="h9", address="10.0.0.9")
    nodes.run(5)
    assert nodes.runs == 2


def test_a_second_machine_for_the_same_node_is_refused(nodes: Nodes) -> None:
    rival = replace(nodes.states[1], agent="rival", host="h9")
    answers = []
    for _ in range(50):
        answers.append(nodes.rounds.greet(1, rival, nodes.now))
        nodes.run(0.5)
    assert answers[0] is None
    assert answers[-1] is not None
    assert answers[-1].refusal.startswith("node rank 1 is taken by node 1 (h1, 10.0.0.1): each")
    assert (nodes.runs, nodes.orders.failure) == (1, "")


def test_a_node_with_another_number_of_ranks_is_refused() -> None:
    nodes = Nodes()
    nodes.start(0)
    nodes.start(1, procs=4)
    nodes.run(2)
    greeting = nodes.greetings[nodes.states[1].agent]
    assert greeting is not None
    assert greeting.refusal.startswith("h1 has 4 processes, but node 0 has 2: all need the same")
    assert nodes.runs == 0


def test_what_was_written_before_counts_for_nothing(nodes: Nodes) -> None:
    """Who has read the traffic can write an old state again."""
    old = replace(nodes.states[1], end=End(kind="stopped"), number=1)
    other = replace(old, number=10**6, session="of another start")
    stranger = replace(old, number=10**6, agent="stranger")
    for state in (old, other, stranger):
        nodes.rounds.note(1, state, nodes.now)
    nodes.run(3)
    assert (nodes.runs, nodes.orders.stop) == (1, False)


def test_states_of_an_earlier_session_are_no_node() -> None:
    """Who has read the traffic of a run can write it again when another has the same token."""
    nodes = Nodes()
    nodes.start(0)
    nodes.run(2)
    old = State(agent="old", host="h1", procs=2, session="of an earlier start", number=5)
    for state in (old, replace(old, number=6), replace(old, session="")):
        assert nodes.rounds.greet(1, state, nodes.now) is None
        nodes.rounds.note(1, state, nodes.now)
    nodes.run(3)
    assert nodes.runs == 0


def test_a_state_that_is_repeated_keeps_no_lost_node_alive(nodes: Nodes) -> None:
    first = replace(nodes.states[1], number=1)
    nodes.silent.add(1)
    for _ in range(2 * int(LOST + GATHER_SECONDS)):
        nodes.rounds.greet(1, first, nodes.now)
        nodes.rounds.note(1, first, nodes.now)
        nodes.run(0.5)
    nodes.run(2)
    assert nodes.orders.failure.startswith("node 1 (h1, 10.0.0.1) was lost")


EVENTS = st.tuples(st.sampled_from(["die", "raise", "silence", "back", "again", "wait"]),
                   st.integers(0, 2))  # fmt: skip


@examples(60)
@given(st.lists(EVENTS, max_size=12))
def test_whatever_happens_the_run_goes_on_or_ends(events: list[tuple[str, int]]) -> None:
    """A round runs with the processes with which it has begun only."""
    nodes = Nodes(nodes=3, limit=100)
    nodes.obedient = True
    nodes.start(0, 1, 2)
    nodes.run(2)
    members = {number: state.agent for number, state in nodes.states.items()}
    for event, node in events:
        before = nodes.runs
        if event == "again":
            nodes.start(node)
        elif event == "silence":
            nodes.silent.add(node)
        elif event == "back":
            nodes.silent.discard(node)
        elif event != "wait":
            nodes.say(node, end={"die": DIED, "raise": RAISED}[event])
        nodes.run(16)
        if nodes.runs and nodes.runs == before:
            assert {n: nodes.states[n].agent for n in range(1, 3)} == {
                n: members[n] for n in range(1, 3)
            }
        members = {number: state.agent for number, state in nodes.states.items()}
    nodes.silent.clear()
    nodes.run(300)
    assert nodes.over is not None or nodes.runs
