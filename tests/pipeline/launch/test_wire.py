"""Messages between nodes over real sockets, and strangers who send others."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from pipeline.distributed.environment import TOKEN
from pipeline.distributed.settings import Attempts, Restarts
from pipeline.errors import RunFailed, UsageError
from pipeline.launch import wire
from pipeline.launch.coordinator import Coordinator
from pipeline.launch.exchange import Link, Server
from pipeline.launch.messages import Beat, Over
from tests.support.waiting import becomes

SECRET = "correct horse"
BEAT = Beat(agent="x", run="r", node=0, host="h", procs=1, port=1)


def coordinator(**fields: Any) -> Coordinator:
    """Return the coordinator of a run of one node."""
    known = {"fewest": 1, "most": 1, "attempts": Attempts(Restarts()),
             "rendezvous_seconds": 60, "run": "r"}  # fmt: skip
    return Coordinator(**{**known, **fields})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Return a function that serves a coordinator with a secret, and returns its port."""
    with contextlib.ExitStack() as stack:

        def start(token: str = SECRET, **fields: Any) -> int:
            monkeypatch.setenv(TOKEN, token)
            server = stack.enter_context(Server(coordinator(**fields), "127.0.0.1", 0))
            return int(server._http.server_address[1])

        yield start


def closed(connection: socket.socket, seconds: float = 20.0) -> bool:
    """Return whether the other side closes a connection in time."""
    connection.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        try:
            while connection.recv(1 << 16):
                pass
        except TimeoutError:
            return False
    return True


def test_nodes_of_one_secret_talk(
    serve: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = serve(spec="/r\udcffn")
    monkeypatch.setenv(TOKEN, f"{SECRET}\n")  # as a file holds it
    with Link("127.0.0.1", port, BEAT) as link:
        assert becomes(lambda: link.reply and link.reply.place)
        assert link.reply is not None
        assert link.reply.spec == "/r?n"
        assert link.refused == ""


def test_another_secret_is_refused_and_named(
    serve: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = serve()
    monkeypatch.setenv(TOKEN, "another")
    with Link("127.0.0.1", port, BEAT) as link:
        assert becomes(lambda: link.refused)
        assert link.refused == "PIPE_RDZV_TOKEN is another one there"
        assert link.reply is None


@pytest.mark.parametrize("value", ["", " \n"])
def test_an_empty_secret_is_a_mistake(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(TOKEN, value)
    with pytest.raises(UsageError, match="PIPE_RDZV_TOKEN is set, but empty"):
        Server(coordinator(), "127.0.0.1", 0)
    with pytest.raises(UsageError, match="PIPE_RDZV_TOKEN is set, but empty"):
        Link("127.0.0.1", 9, BEAT)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "no-such-host.invalid"])
def test_beyond_the_loopback_there_must_be_a_secret(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    words = "PIPE_RDZV_TOKEN is not set, .*make a secret once, with python3 -c .* on every node"
    with pytest.raises(UsageError, match=words):
        Server(coordinator(), host, 0)
    with pytest.raises(UsageError, match=words):
        Link(host, 9, BEAT)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.3.2.1", "::1"])
def test_on_the_loopback_none_is_needed(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert wire.token(host) == b""
    monkeypatch.setenv(TOKEN, SECRET)
    assert wire.token(host) == SECRET.encode()


def test_a_forged_message_ends_nothing(serve: Callable[..., int]) -> None:
    """A stop in the name of a node that takes part, signed without the secret."""
    port = serve()
    with Link("127.0.0.1", port, BEAT) as link:
        assert becomes(lambda: link.reply and link.reply.place)
        forged = wire.packed(replace(BEAT, stopping="SIGTERM"))
        for secret in (b"", b"another"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            signed = wire.signature(secret, "beat", "n", forged)
            connection.request("POST", "/", forged, {wire.NONCE: "n", wire.SIGNATURE: signed})
            assert connection.getresponse().status == http.HTTPStatus.FORBIDDEN
            connection.close()
        link.reply = None
        assert becomes(lambda: link.reply)
        assert link.reply is not None
        assert (link.reply.stop, link.reply.over) == (False, None)


def test_who_stands_in_for_node_0_learns_nothing_and_is_not_obeyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []

    class Imposter(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            heard.append(f"{self.headers}{body.decode()}")
            reply = b'{"round": 1, "over": {"kind": "stopped"}}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.send_header(wire.SIGNATURE, self.headers[wire.SIGNATURE])  # the beat's own
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *words: object) -> None:
            pass

    monkeypatch.setenv(TOKEN, SECRET)
    with HTTPServer(("127.0.0.1", 0), Imposter) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Link("127.0.0.1", server.server_port, BEAT) as link:
            assert becomes(lambda: link.refused)
            assert link.refused == "it does not know this node's PIPE_RDZV_TOKEN"
            assert link.reply is None
        server.shutdown()
    assert '"agent": "x"' in heard[0]
    assert SECRET not in "".join(heard)


def test_who_sends_slowly_is_cut_off(
    serve: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, the message never."""
    monkeypatch.setattr(wire, "CONTACT_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", serve())) as slow:

        def refused() -> bool:
            try:
                slow.sendall(b"a")
            except OSError:
                return True
            time.sleep(0.1)
            return False

        assert becomes(refused)


def test_one_address_cannot_take_all_connections(serve: Callable[..., int]) -> None:
    port = serve()
    with contextlib.ExitStack() as stack:
        greedy = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(wire.MOST_OF_ONE + 5)
        ]
        assert all(closed(connection) for connection in greedy[wire.MOST_OF_ONE :])
        assert not any(closed(connection, 0.01) for connection in greedy[:3])
        other = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
        with other:
            body = wire.packed(BEAT)
            signed = wire.signature(SECRET.encode(), "beat", "n", body)
            other.sendall(
                f"POST / HTTP/1.0\r\n{wire.NONCE}: n\r\n{wire.SIGNATURE}: {signed}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            assert other.recv(1 << 16).startswith(b"HTTP/1.0 200")


@pytest.mark.parametrize("sent", [b"POST / HTTP/1.0\r\n", b""])
def test_a_head_without_end_is_not_kept(serve: Callable[..., int], sent: bytes) -> None:
    """Lines, or one line, of a message that are far over its limit."""
    line = b"A: " + b"a" * 8000 + (b"\r\n" if sent else b"")
    with socket.create_connection(("127.0.0.1", serve())) as long:
        with contextlib.suppress(ConnectionError):
            long.sendall(sent + line * 40)
        assert closed(long, wire.CONTACT_SECONDS / 2)


def test_a_failure_of_any_length_and_bytes_is_told(serve: Callable[..., int]) -> None:
    over = Over(kind="failed", text="\udcff\x00" * 4000)
    running = coordinator()
    running.end(over)
    with Server(running, "127.0.0.1", 0) as server:
        port = int(server._http.server_address[1])
        with Link("127.0.0.1", port, BEAT) as link:
            assert becomes(lambda: link.reply)
            assert link.reply is not None
            assert link.reply.over == Over(kind="failed", text="?\x00" * 4000)


def test_node_0_needs_no_network_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its link holds where nothing can connect, and has its address on the way to itself."""
    monkeypatch.delenv(TOKEN, raising=False)
    with Server(coordinator(fewest=2, most=2), "127.0.0.1", 0) as server:
        port = int(server._http.server_address[1])
        with Link("127.0.0.1", port, replace(BEAT, agent="y", node=1)) as other:
            assert becomes(lambda: other.reply)
            monkeypatch.setattr(http.client.HTTPConnection, "connect", _refused)
            with Link("127.0.0.1", port, BEAT, server) as link:
                assert becomes(lambda: link.reply and link.reply.place)
                assert link.reply is not None
                assert link.reply.place is not None
                assert (link.reply.place.master, link.address) == ("127.0.0.1", "127.0.0.1")
                assert link.silent_for() == 0.0


def _refused(connection: http.client.HTTPConnection) -> None:
    raise ConnectionRefusedError


@pytest.mark.parametrize("broken", ["beat", "tick"])
def test_what_ends_the_coordinator_ends_its_node(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Its node would wait for ever for an answer, or never notice that another one is lost."""
    monkeypatch.setenv(TOKEN, SECRET)

    def fail(*_: object) -> None:
        raise KeyError("unexpected")

    decides = coordinator()
    with (
        Server(decides, "127.0.0.1", 0) as server,
        Link("127.0.0.1", 1, BEAT, server) as link,
    ):
        assert becomes(lambda: link.reply)
        assert link.silent_for() == 0
        setattr(decides, broken, fail)
        assert becomes(lambda: link._failure)
        for _ in range(2):
            with pytest.raises(
                RunFailed, match="node 0 cannot take part any more: KeyError: 'unex"
            ):
                link.silent_for()


def test_what_ends_the_beats_ends_the_node(serve: Callable[..., int]) -> None:
    with Link("127.0.0.1", serve(), BEAT) as link:
        assert becomes(lambda: link.reply)
        link.tell(landmarks=object())  # which is no JSON
        assert becomes(lambda: link._failure)
        with pytest.raises(RunFailed, match="node 0 cannot take part any more: TypeError: "):
            link.silent_for()
