"""Beats over the network: JSON over HTTP, from each node's agent to the coordinator on node 0."""

from __future__ import annotations

import hmac
import http.client
import json
import os
import socket
import threading
import time
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.errors import UsageError
from pipeline.launch.coordinator import Coordinator
from pipeline.launch.messages import Beat, Reply

BEAT_SECONDS = 1.0
CONTACT_SECONDS = 4.0
"""Seconds that the coordinator gets to answer a beat."""
TICK_SECONDS = 0.2
MOST_BYTES = 1 << 17
"""Size limit of a message."""
TOKEN = "PIPE_RDZV_TOKEN"
"""Environment variable: a secret that all nodes must have, if node 0 has one."""
_BEATS, _REPLIES = TypeAdapter(Beat), TypeAdapter(Reply)


class Server:
    """Answers beats at one address, and lets the coordinator look at the clock."""

    def __init__(self, coordinator: Coordinator, host: str, port: int) -> None:
        """Raises UsageError if nothing can listen there."""
        self._coordinator, self._lock = coordinator, threading.Lock()
        self._closed = threading.Event()
        handler = type("_Handler", (_Handler,), {"answer": self._answer})
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            kind = type("_Server", (_QuietServer,), {"address_family": family})
            self._http = kind(address[:2], handler)
        except OSError as error:
            raise UsageError(
                f"node 0 cannot listen at {host}:{port}: {error.strerror}",
                hint="--rdzv names an address of node 0 and a port that is free there",
            ) from error
        for work in (self._http.serve_forever, self._tick):
            threading.Thread(target=work, name="pipe-coordinator", daemon=True).start()

    def __enter__(self) -> Server:
        return self

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

    def _answer(self, beat: Beat, address: str) -> Reply:
        with self._lock:
            return self._coordinator.beat(beat, address, time.monotonic())

    def _tick(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            with self._lock:
                self._coordinator.tick(time.monotonic())


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep a client that went away off the screen."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one beat."""

    timeout = CONTACT_SECONDS
    answer: Any

    def do_POST(self) -> None:
        secret, given = os.environ.get(TOKEN, ""), self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {secret}".encode()):
            self.send_error(403)
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self.send_error(413)
            return
        try:
            beat = _BEATS.validate_json(self.rfile.read(int(length)))
        except ValidationError:
            self.send_error(400)
            return
        body = json.dumps(asdict(type(self).answer(beat, self.client_address[0]))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Keep the server off the screen."""


class Link:
    """Beats for this node, about once a second, in a thread of its own: work of the main thread
    and an address that does not answer keep nobody waiting."""

    def __init__(self, host: str, port: int, beat: Beat) -> None:
        self.beat = beat
        self.reply: Reply | None = None
        self.refused = ""
        """Why the coordinator does not talk to this node; empty if it does."""
        self.address = ""
        """This node's address on the way to the coordinator."""
        self._host, self._port = host, port
        self._contact = time.monotonic()
        self._wake, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="pipe-beats", daemon=True).start()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._wake.set()

    def tell(self, **changes: Any) -> None:
        """Change this node's state, and beat at once."""
        self.beat = replace(self.beat, **changes)
        self._wake.set()

    def silent_for(self) -> float:
        """Seconds since the coordinator's last answer, or since the start."""
        return time.monotonic() - self._contact

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            try:
                self.reply = self._exchange(self.beat)
                self._contact = time.monotonic()
            except (OSError, http.client.HTTPException, ValueError):
                pass
            self._wake.wait(BEAT_SECONDS)

    def _exchange(self, beat: Beat) -> Reply:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONTACT_SECONDS)
        try:
            connection.connect()
            self.address = connection.sock.getsockname()[0]
            secret = os.environ.get(TOKEN, "")
            headers = {"Authorization": f"Bearer {secret}"}
            connection.request("POST", "/", json.dumps(asdict(beat)), headers)
            answer = connection.getresponse()
            self.refused = f"{TOKEN} is another one there" if answer.status == 403 else ""
            if answer.status != 200:
                raise ValueError(answer.reason)
            return _REPLIES.validate_json(answer.read(MOST_BYTES))
        finally:
            connection.close()
