"""Beats over the network: JSON over HTTP, from each node's agent to the coordinator on node 0."""

from __future__ import annotations

import contextlib
import http.client
import secrets
import socket
import threading
import time
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.distributed.environment import TOKEN
from pipeline.errors import RunFailed, UsageError, in_words
from pipeline.execution.failures import ON_EVERY_NODE
from pipeline.launch.coordinator import Coordinator
from pipeline.launch.messages import Beat, Reply
from pipeline.launch.wire import (
    CONTACT_SECONDS,
    MOST_BYTES,
    NONCE,
    SIGNATURE,
    BoundedHandler,
    BoundedServer,
    is_signed,
    packed,
    signature,
    token,
)

BEAT_SECONDS = 1.0
TICK_SECONDS = 0.2
_BEATS, _REPLIES = TypeAdapter(Beat), TypeAdapter(Reply)


class Server(contextlib.AbstractContextManager["Server"]):
    """Answers beats at one address, and lets the coordinator look at the clock."""

    def __init__(self, coordinator: Coordinator, host: str, port: int) -> None:
        """Raises UsageError if nothing can listen there, and as `wire.token` does."""
        self._coordinator, self._lock = coordinator, threading.Lock()
        self._closed = threading.Event()
        self._failure: Exception | None = None
        handler = type("_Handler", (_Handler,), {"answer": self._answer, "secret": token(host)})
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._http = BoundedServer(address, family, handler)
        except OSError as error:
            raise UsageError(
                f"node 0 cannot listen at {host}:{port}: {error.strerror}",
                hint="--rdzv names an address of node 0 and a port that is free there",
            ) from error
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address[0], address[1] or 1, *address[2:]))  # which sends nothing
            self.address = str(probe.getsockname()[0])
        """This node's address on the way to itself."""
        for work in (self._http.serve_forever, self._tick):
            threading.Thread(target=work, name="pipe-coordinator", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._http.shutdown()
        self._http.server_close()

    def linger(self, seconds: float, nodes: int = 0) -> None:
        """Wait until all agents, and at least as many as `nodes`, know that the run is over, at
        most for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                if self._coordinator.known_by_all(nodes):
                    return
            time.sleep(TICK_SECONDS)

    def own(self, beat: Beat) -> Reply:
        """The coordinator's answer to this process's own agent, without any network. Raises what
        has ended its looks at the clock: no one would notice lost nodes any more."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            self._coordinator.own = beat.agent
        return self._answer(beat, self.address)

    def _answer(self, beat: Beat, address: str) -> Reply:
        with self._lock:
            return self._coordinator.beat(beat, address, time.monotonic())

    def _tick(self) -> None:
        try:
            while not self._closed.wait(TICK_SECONDS):
                with self._lock:
                    self._coordinator.tick(time.monotonic())
        except Exception as error:
            self._failure = error


class _Handler(BoundedHandler):
    """Answers one beat."""

    answer: Any
    secret: bytes

    def do_POST(self) -> None:  # noqa: N802
        body, nonce = self.body(), self.headers.get(NONCE, "")
        if body is None:
            self.send_error(413)
            return
        if not is_signed(self.secret, "beat", nonce, body, self.headers.get(SIGNATURE)):
            self.send_error(403)
            return
        try:
            beat = _BEATS.validate_json(body)
        except ValidationError:
            self.send_error(400)
            return
        reply = packed(type(self).answer(beat, self.client_address[0]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.send_header(SIGNATURE, signature(self.secret, "reply", nonce, reply))
        self.end_headers()
        self.wfile.write(reply)


class Link(contextlib.AbstractContextManager["Link"]):
    """Beats for this node, about once a second, in a separate thread: work of the main thread and
    an address that does not answer keep no one waiting."""

    def __init__(self, host: str, port: int, beat: Beat, server: Server | None = None) -> None:
        """On node 0 the coordinator's `server` is in this process: a loaded machine or a full
        network cannot cut that link. Raises UsageError as `wire.token` does."""
        self._server = server
        self.beat = beat
        self.reply: Reply | None = None
        self.refused = ""
        """Why the last answer was no reply to this node; empty if it was one."""
        self.address = server.address if server else ""
        """This node's address on the way to the coordinator."""
        self._host, self._port, self._secret = host, port, token(host)
        self._contact = time.monotonic()
        self._failure: Exception | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="pipe-beats", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._wake.set()

    def tell(self, **changes: Any) -> None:
        """Change this node's state, and beat at once."""
        self.beat = replace(self.beat, **changes)
        self._wake.set()

    def silent_for(self) -> float:
        """Seconds since the coordinator's last answer, or since the start; none on node 0. Raises
        RunFailed where something unexpected has ended the beats: no one would hear of this node
        any more."""
        if self._failure is not None:
            raise RunFailed(
                f"node {self.beat.node} cannot take part any more: {in_words(self._failure)}\n"
                f"{ON_EVERY_NODE}"
            ) from self._failure
        return 0.0 if self._server else time.monotonic() - self._contact

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            try:
                self.reply = self._exchange(self.beat)
                self._contact = time.monotonic()
            except (OSError, http.client.HTTPException, ValueError):
                pass  # no answer this time: `silent_for` counts the seconds
            except Exception as error:
                self._failure = error
                return
            self._wake.wait(BEAT_SECONDS)

    def _exchange(self, beat: Beat) -> Reply:
        if self._server:
            return self._server.own(beat)
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONTACT_SECONDS)
        try:
            connection.connect()
            self.address = connection.sock.getsockname()[0]
            nonce, body = secrets.token_hex(16), packed(beat)
            signed = signature(self._secret, "beat", nonce, body)
            connection.request("POST", "/", body, {NONCE: nonce, SIGNATURE: signed})
            answer = connection.getresponse()
            content, signed = answer.read(MOST_BYTES), answer.getheader(SIGNATURE, "")
            self.refused = self._refusal(answer.status, nonce, content, signed)
            if self.refused:
                raise ValueError(self.refused)
            return _REPLIES.validate_json(content)
        finally:
            connection.close()

    def _refusal(self, status: int, nonce: str, content: bytes, signed: str) -> str:
        """Why an answer is not a reply to this node; empty if it is one."""
        if status == http.HTTPStatus.FORBIDDEN:
            return f"{TOKEN} is another one there"
        if status != http.HTTPStatus.OK:
            return f"it answers with status {status}"
        if not is_signed(self._secret, "reply", nonce, content, signed):
            return f"it does not know this node's {TOKEN}"
        return ""
