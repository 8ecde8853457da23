"""Sealed values in the nodes' store, over real sockets, and strangers who come by."""

from __future__ import annotations

import contextlib
import socket

import pytest

from pipeline.distributed.environment import TOKEN
from pipeline.errors import RunFailed, UsageError
from pipeline.launch.board import Board, connected, served, token
from tests.support.ports import free_port

SECRET = "correct horse"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def board(port: int) -> Board:
    """What node 0 writes."""
    return Board(served("127.0.0.1", port), SECRET)


def test_nodes_of_one_token_read_each_other(board: Board, port: int) -> None:
    other = Board(connected("127.0.0.1", port), SECRET)
    assert other.read("orders") is None
    board.write("orders", "run \udcff")
    other.write("node/2", "é")
    assert other.read("orders") == "run ?"
    sealed = dict(board.read_sealed(["node/1", "node/2"]))
    assert {name: board.opened(name, value) for name, value in sealed.items()} == {"node/2": "é"}


def test_who_has_another_token_reads_and_writes_nothing(board: Board, port: int) -> None:
    stranger, store = Board(connected("127.0.0.1", port), "another"), connected("127.0.0.1", port)
    board.write("orders", "the recipe's secrets")
    assert stranger.read("orders") is None
    assert b"recipe" not in store.get("orders")
    stranger.write("node/1", "stop")
    assert board.read("node/1") is None
    store.set("node/2", b"garbage")
    assert board.read("node/2") is None
    board.write("node/3", "ends")
    store.set("node/4", store.get("node/3"))  # what was written for another name
    assert board.read("node/4") is None


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 4096, b"\0", b""])
def test_garbage_and_silence_end_no_store(board: Board, port: int, sent: bytes) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                stranger.sendall(sent)
        other = Board(connected("127.0.0.1", port), SECRET)
        other.write("node/1", "there")
        assert board.read("node/1") == "there"


def test_a_store_is_served_at_one_address_only(port: int) -> None:
    store = served("127.0.0.2", port)
    socket.create_connection(("127.0.0.2", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    with pytest.raises(RunFailed, match=f"node 0 cannot listen at 127.0.0.2:{port}: Address alr"):
        served("127.0.0.2", port)
    del store
    with pytest.raises(UsageError, match=r"203\.0\.113\.1:1: Cannot assign"):
        served("203.0.113.1", 1)


@pytest.mark.parametrize("value", ["", " \n"])
def test_an_empty_token_is_a_mistake(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(TOKEN, value)
    with pytest.raises(UsageError, match="PIPE_RDZV_TOKEN is set, but empty"):
        token("127.0.0.1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "no-such-host.invalid"])
def test_beyond_the_loopback_there_must_be_a_token(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert token(host) is None
    monkeypatch.setenv(TOKEN, f"{SECRET}\n")  # as a file holds it
    assert token(host) == SECRET


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.3.2.1", "::1"])
def test_on_the_loopback_none_is_needed(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert token(host) == ""
    monkeypatch.setenv(TOKEN, SECRET)
    assert token(host) == SECRET
