"""Hosts of a network, as network namespaces joined by a bridge."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

_NUMBERS = itertools.count(os.getpid() % 1000 * 10)


def why_not() -> str:
    """Return why hosts cannot be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"pipe-probe-{os.getpid()}"  # several processes may ask at once
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    if done.returncode:
        return f"no network namespaces: {done.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


class Host:
    """A machine of the network: its own address, and its own name."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[str]
    ) -> subprocess.Popen[str]:
        """Start a command here, with its output in a file."""
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c"]
        script = f'hostname {self.name}; exec "$@"'
        return subprocess.Popen(
            [*inside, script, "sh", *command], text=True, env=dict(environment),
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def processes(self) -> list[int]:
        """Return the processes of this host."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        return [int(line) for line in done.stdout.split()]

    def listening(self) -> set[str]:
        """Return the addresses on which anything here listens."""
        return {address for address, _ in self._listening()}

    def ports(self) -> set[int]:
        """Return the ports at which others reach what listens here."""
        return {port for address, port in self._listening() if address != "127.0.0.1"}

    def _listening(self) -> list[tuple[str, int]]:
        found = []
        for pid in self.processes()[:1]:
            table = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
            places = [line.split()[1] for line in table if line.split()[3] == "0A"]
            for address, port in (place.split(":") for place in places):
                found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of this host."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def link(self, state: str) -> None:
        """Take its link `up` or `down`."""
        _ip("link", "set", f"v{self.name}", state)


@contextlib.contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """Make `count` hosts, and remove them with all their processes."""
    number = next(_NUMBERS)
    bridge, subnet = f"pb{number}", f"10.{100 + number // 250 % 100}.{number % 250}"
    hosts = [Host(f"p{number}h{n}", f"{subnet}.{n + 1}") for n in range(count)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in hosts:
            _ip("netns", "add", host.name)
            pair = ("type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "add", f"v{host.name}", *pair)
            _ip("link", "set", f"v{host.name}", "master", bridge, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for interface in ("eth0", "lo"):
                _ip("-n", host.name, "link", "set", interface, "up")
        yield hosts
    finally:
        for host in hosts:
            if Path("/run/netns", host.name).exists():
                host.send(signal.SIGKILL)
                _ip("netns", "del", host.name)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", bridge)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
