"""A node's exchange with node 0, in one process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from pipeline.distributed.placement import NodePlacement
from pipeline.distributed.settings import Attempts, Restarts, Timeouts
from pipeline.launch import board, nodes
from pipeline.launch.nodes import Lead, Link
from pipeline.launch.rounds import End, Rounds, State
from tests.support.ports import free_port
from tests.support.waiting import becomes

SECRET = "a secret of this test"


def placed(rank: int, port: int) -> NodePlacement:
    return NodePlacement(
        source="options", node_rank=rank, nodes=2, host="127.0.0.1", port=port, by_hand=True
    )


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lead]:
    """Return node 0's of a run of two nodes."""
    monkeypatch.setattr(nodes, "LINGER_SECONDS", 0.0)
    rounds = Rounds(
        nodes=2, procs=1, attempts=Attempts(Restarts()), timeouts=Timeouts(rendezvous=60)
    )
    with Lead(placed(0, free_port()), SECRET, rounds, "the run") as made:
        yield made


def port_of(lead: Lead) -> int:
    return lead._node.port


def test_a_node_gets_the_run_and_orders(lead: Lead) -> None:
    with Link(placed(1, port_of(lead)), SECRET, State.of(1)) as link:
        assert becomes(lambda: link.orders is not None and link.orders.runs, 15)
        assert link.spec == "the run"
        lead.tell(round=1, end=End(kind="finished"))
        link.tell(round=1, end=End(kind="finished"))
        assert becomes(lambda: link.orders is not None and link.orders.over is not None, 15)
        link.tell(knows=True)
        link.flush()


def test_a_process_that_waits_for_a_place_writes_over_nothing(lead: Lead) -> None:
    """Otherwise node 0 might see only its states, and take the node for lost."""
    with Link(placed(1, port_of(lead)), SECRET, State.of(1)) as link:
        assert becomes(lambda: lead._board.read("node/1") is not None, 15)
        with Link(placed(1, port_of(lead)), SECRET, State.of(1)) as rival:
            assert becomes(lambda: rival._written is not None, 15)
            found = set()
            for _ in range(300):
                text = lead._board.read("node/1")
                found.add(text and json.loads(text)["agent"])
                time.sleep(0.01)
    assert found == {link.state.agent}


def test_a_network_on_which_every_operation_takes_long_is_no_silence(
    lead: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns are longer than the gap after which a node has to show again that it is greeted."""
    with Link(placed(1, port_of(lead)), SECRET, State.of(1)) as link:
        read = board.Board.read

        def slow(self: board.Board, name: str) -> str | None:
            time.sleep(0.8)
            return read(self, name)

        monkeypatch.setattr(board.Board, "read", slow)
        assert becomes(lambda: link.orders is not None and link.orders.runs, 20)
        first = link.orders.number if link.orders else 0
        assert becomes(lambda: link.orders is not None and link.orders.number > first + 10, 20)
        assert link.silent_for() < 8


def test_no_thread_is_left_in_torch_where_node_0_is_not_there() -> None:
    """It would abort the process at its end, whose exit code then says nothing."""
    before = {*threading.enumerate()}
    with Link(placed(1, free_port()), SECRET, State.of(1)):
        time.sleep(0.5)
    assert {*threading.enumerate()} <= before


def test_another_token_is_the_reason_for_silence(lead: Lead) -> None:
    with Link(placed(1, port_of(lead)), "another", State.of(1)) as link:
        assert becomes(lambda: "PIPE_RDZV_TOKEN" in link.trouble, 15)
        time.sleep(1)
        assert (link.orders, link.spec) == (None, "")
