"""Ranks of another launcher: whether all are here, and where rank 0 serves them."""

from __future__ import annotations

import socket

import pytest

from pipeline.distributed import process_group
from pipeline.distributed.environment import TORCHRUN_VARIABLES, is_single_node
from pipeline.errors import RunFailed, UsageError

CLUSTER = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all traces of a launcher."""
    for name in (*TORCHRUN_VARIABLES, "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "here"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, False),
        ({"LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, True),
    ],
)
def test_whether_all_are_here(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], here: bool
) -> None:
    set_all(monkeypatch, CLUSTER | variables if variables else {})
    assert is_single_node() is here


def test_rank_0_serves_the_others_at_the_address_that_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.2", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    set_all(monkeypatch, CLUSTER | place | {"WORLD_SIZE": "1"})
    store = process_group.environment_store()
    assert store is not None
    store.set("key", "value")
    socket.create_connection(("127.0.0.2", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "that is 127.0.0.1 here, which other machines do not reach"),
        ("203.0.113.9", "Cannot assign requested address"),
    ],
)
def test_an_address_that_rank_0_cannot_serve_the_others_at(
    monkeypatch: pytest.MonkeyPatch, host: str, words: str
) -> None:
    set_all(monkeypatch, CLUSTER | {"MASTER_ADDR": host, "LOCAL_RANK": "0"})
    with pytest.raises(UsageError, match=f"rank 0 cannot listen at MASTER_ADDR={host}.*{words}"):
        process_group.environment_store()


def test_a_port_that_is_taken_may_be_another_one_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        place = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(taken.getsockname()[1])}
        set_all(monkeypatch, CLUSTER | place | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
        with pytest.raises(RunFailed, match="Address already in use") as caught:
            process_group.environment_store()
    assert caught.value.restart == "always"
