"""Signed JSON messages over HTTP, and a server that strangers can neither exhaust nor hold up."""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Literal, cast

from pipeline.distributed.environment import TOKEN
from pipeline.distributed.placement import addresses_of
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NONCE, SIGNATURE = "X-Pipe-Nonce", "X-Pipe-Signature"
CONTACT_SECONDS = 4.0
"""Seconds for a message and its answer."""
MOST_BYTES = 1 << 17
"""Size limit of a message."""
MOST_HEAD = 1 << 14
"""Size limit of what precedes a message."""
MAKE_TOKEN = (
    "make a secret once, with python3 -c 'import secrets; print(secrets.token_hex())', and set "
    f"{TOKEN} to it on every node; scripts of `pipe launch` do so"
)
MOST_CONNECTIONS = 512
MOST_OF_ONE = 16
"""Connections of one address at a time; a node has one."""


def token(host: str) -> bytes:
    """The secret of messages to and from `host`, without spaces around it; empty if there is none,
    which only the loopback interface allows. Raises UsageError if there must be one, and if the
    variable is there and holds nothing, as it does when the file that was to fill it is missing."""
    value = os.environb.get(TOKEN.encode())
    if value is not None and not value.strip():
        raise UsageError(f"{TOKEN} is set, but empty", hint=MAKE_TOKEN)
    if value is None:
        found = [ip_address(one.partition("%")[0]) for one in addresses_of(host)]
        if not found or not all(one.is_loopback for one in found):
            raise UsageError(
                f"{TOKEN} is not set, so whoever reaches node 0 at {host} could end the run or "
                "take part in it",
                hint=MAKE_TOKEN,
            )
    return (value or b"").strip()


def packed(message: DataclassInstance) -> bytes:
    """A message as JSON. Bytes of a file's name that are not UTF-8 become question marks, since the
    other side would refuse them."""
    return json.dumps(asdict(message), ensure_ascii=False).encode(errors="replace")


def signature(secret: bytes, kind: Literal["beat", "reply"], nonce: str, body: bytes) -> str:
    """The HMAC-SHA-256 (RFC 2104) of a message, as hexadecimal digits, from which no one learns the
    secret. `nonce` is a random number of the beat's, so that no reply fits another beat."""
    return hmac.new(secret, f"{kind}\0{nonce}\0".encode() + body, "sha256").hexdigest()


def is_signed(
    secret: bytes, kind: Literal["beat", "reply"], nonce: str, body: bytes, given: str | None
) -> bool:
    """Whether `given` is the message's signature."""
    right = signature(secret, kind, nonce, body)
    return hmac.compare_digest((given or "").encode(), right.encode())


class BoundedServer(ThreadingHTTPServer):
    """A server with a thread a connection, for a limited number of connections and a limited
    time."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self, address: tuple[Any, ...], family: int, handler: type[BaseHTTPRequestHandler]
    ) -> None:
        """Raises OSError if nothing can listen there."""
        self.address_family = family
        self._until: dict[socket.socket, tuple[str, float]] = {}
        super().__init__(address[:2], handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more connection, from this address."""
        host = client_address[0]
        of_one = sum(other == host for other, _ in list(self._until.values()))
        if len(self._until) >= MOST_CONNECTIONS or of_one >= MOST_OF_ONE:
            return False
        self._until[request] = (host, time.monotonic() + CONTACT_SECONDS)
        return True

    def service_actions(self) -> None:
        """End connections whose time is over, about twice a second."""
        for request, (_, until) in list(self._until.items()):
            if time.monotonic() > until:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._until.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep a client that went away off the screen."""


class BoundedHandler(BaseHTTPRequestHandler):
    """A handler of one message of a limited size."""

    timeout = CONTACT_SECONDS
    rbufsize = 0

    def setup(self) -> None:
        """Prepare to read no more than a message may have."""
        super().setup()
        self.rfile = _Bounded(cast("io.RawIOBase", self.rfile))

    def body(self) -> bytes | None:
        """The message; None if its size is not said, or over the limit."""
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and len(length) < 8 and int(length) <= MOST_BYTES):
            return None
        return self.rfile.read(int(length))

    def log_message(self, *words: object) -> None:
        """Keep the server off the screen."""


class _Bounded(io.BufferedReader):
    """A stream that ends after a head and a message."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self._left = MOST_HEAD + MOST_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._within(super().readline, size)

    def read(self, size: int | None = -1, /) -> bytes:
        return self._within(super().read, size)

    def _within(self, read: Callable[[int], bytes], size: int | None) -> bytes:
        content = read(self._left if size is None or size < 0 else min(size, self._left))
        self._left -= len(content)
        return content
