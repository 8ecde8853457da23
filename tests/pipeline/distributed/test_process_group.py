"""Waiting and sharing among real ranks, where rank 0 serves, and facts that must be the same."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from pipeline.distributed import process_group
from pipeline.distributed.environment import rank_environment
from pipeline.distributed.process_group import (
    PIECE,
    DistContext,
    Place,
    _differences,
    environment_store,
    in_one,
    receive,
)
from pipeline.errors import RunFailed, StageError, UsageError
from tests.support.ports import free_port
from tests.support.processes import forking, run_ranks


def _exchange(dist: DistContext, folder: str) -> dict[str, Any]:
    store = dist.store
    assert store is not None
    shared, keys = [], []
    for number in range(20):
        shared.append(dist.broadcast_str(f"text {number}" if dist.is_main else None))
        with dist.rank0_first() as main:
            file = Path(folder, str(number))
            if main:
                file.touch()
            else:
                assert file.exists()
        dist.barrier()
        keys.append(store.num_keys())
    long = dist.broadcast_str("x" * (2 * PIECE + 7) if dist.is_main else None)
    own = "é" * (dist.rank + 1)  # of another length on each rank
    refusals = []
    for facts in ([{"weights": 1}, {"weights": 1}, {"weights": 2}], [{"weights": 1}] * 3):
        try:
            dist.require_same("model", facts[dist.rank])
        except StageError as error:
            refusals.append(str(error))
    return {
        "shared": shared, "keys": keys[2:], "long": len(long), "gathered": dist.gather([own]),
        "collected": [text.decode() for text in dist.collect(own.encode())], "refused": refusals,
        "any": [dist.any(dist.rank == 1), dist.any(False)],
    }  # fmt: skip


def test_calls_agree_and_leave_no_keys(tmp_path: Path) -> None:
    found = run_ranks(_exchange, 3, str(tmp_path))
    assert [rank["shared"] for rank in found] == [[f"text {n}" for n in range(20)]] * 3
    for rank in found:
        assert max(rank["keys"]) - min(rank["keys"]) <= 8
    assert [rank["long"] for rank in found] == [2 * PIECE + 7] * 3
    assert [rank["gathered"] for rank in found] == [[["é"], ["éé"], ["ééé"]]] * 3
    assert [rank["collected"] for rank in found] == [["é", "éé", "ééé"], [], []]
    assert [rank["any"] for rank in found] == [[True, False]] * 3
    assert [rank["refused"] for rank in found] == [found[0]["refused"]] * 3
    (refused,) = found[0]["refused"]
    assert refused.startswith("the ranks of this run do not have the same model: weights is 1 on")


def test_one_process_waits_for_nobody() -> None:
    dist = DistContext(device=None)  # type: ignore[arg-type]
    dist.barrier()
    assert dist.broadcast_str("text") == "text"
    assert dist.gather({"a": 1}) == [{"a": 1}]
    dist.require_same("x", {"y": object()})
    with dist.rank0_first() as main:
        assert main


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Rank 0 of two under another launcher, which does not say how many are here."""
    for name in ("LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "23456")
    return monkeypatch


def test_rank_0_serves_the_others_at_the_address_that_is_stated(
    cluster: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.2", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in {"ADDR": "127.0.0.2", "PORT": str(port)}.items():
        cluster.setenv(f"MASTER_{name}", value)
    cluster.setenv("WORLD_SIZE", "1")
    store = environment_store()
    assert store is not None
    store.set("key", "value")
    socket.create_connection(("127.0.0.2", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def _last_barrier(rank: int, port: int, leaves: bool) -> None:
    os.environ |= rank_environment(rank, 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = {"rank": rank, "world_size": 2, "local_rank": rank, "local_world_size": 2}
    store = environment_store()
    assert store is not None
    dist = DistContext(**place, device=torch.device("cpu"), store=store)
    if rank:  # slow to read that the barrier is open
        process_group.receive = lambda *asked: time.sleep(0.5) or receive(*asked)
    dist.barrier()
    if leaves:
        process_group.leave(dist)
    os._exit(0)


@pytest.mark.parametrize("leaves", [True, False])
def test_who_serves_the_store_leaves_last(leaves: bool) -> None:
    port = free_port()
    ranks = [forking().Process(target=_last_barrier, args=(rank, port, leaves)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0 if leaves else 1]


def test_after_an_error_it_waits_for_nobody() -> None:
    dist = DistContext(world_size=2, device=torch.device("cpu"), store=HashStore())
    began = time.monotonic()
    process_group.leave(dist, StageError)
    assert time.monotonic() - began < process_group.LEAVING.total_seconds() / 2


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "that is 127.0.0.1 here, which other machines do not reach"),
        ("203.0.113.9", "Cannot assign requested address"),
    ],
)
def test_an_address_that_rank_0_cannot_serve_the_others_at(
    cluster: pytest.MonkeyPatch, host: str, words: str
) -> None:
    cluster.setenv("MASTER_ADDR", host)
    with pytest.raises(UsageError, match=f"rank 0 cannot listen at MASTER_ADDR={host}.*{words}"):
        environment_store()


def test_a_port_that_is_taken_may_be_another_one_next_time(cluster: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        cluster.setenv("MASTER_ADDR", "127.0.0.2")
        cluster.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        cluster.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(RunFailed, match="Address already in use") as caught:
            environment_store()
    assert caught.value.restart == "always"


HERE = [(0, "a")] * 4
FOUR = [(0, "a"), (0, "a"), (1, "b"), (1, "b")]


def said(facts: list[dict[str, Any]], places: list[Place] = FOUR) -> str:
    return in_one(list(_differences(facts, places)))


def test_what_differs_is_named_with_its_ranks_and_nodes() -> None:
    digest = "d" * 64
    facts = [{"lr": 0.003, "model": digest}] * 2 + [{"lr": 0.3, "model": digest}] * 2
    assert said(facts) == (
        "lr is 0.003 on ranks 0 to 1 (node 0, a), 0.3 on ranks 2 to 3 (node 1, b)"
    )
    assert said(facts, HERE) == "lr is 0.003 on ranks 0 to 1, 0.3 on ranks 2 to 3"
    facts[1] = {"model": "e" * 64}
    assert said(facts) == (
        "lr is 0.003 on rank 0 (node 0, a), None on rank 1 (node 0, a), 0.3 on ranks 2 to 3 "
        "(node 1, b); model is dddddddddddd on ranks 0, 2 to 3 (node 0, a; node 1, b), "
        "eeeeeeeeeeee on rank 1 (node 0, a)"
    )


def test_many_differences_are_counted() -> None:
    facts = [{str(number): rank for number in range(9)} for rank in range(2)]
    assert said(facts, HERE[:2]).endswith("3 is 0 on rank 0, 1 on rank 1; and 5 more")


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)), min_size=1, max_size=4))
def test_a_sentence_for_each_fact_that_differs(facts: list[dict[str, int]]) -> None:
    differ = {name for name in "abc" if len({each.get(name) for each in facts}) > 1}
    assert {text[0] for text in _differences(facts, HERE)} == differ
