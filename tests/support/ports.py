"""Ports for a test's own servers."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of the loopback address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
