"""Other machines cannot connect to a run of this one."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess

import psutil
import pytest

from tests.support import network, trials
from tests.support.pipe import Pipe


def outside() -> str:
    """Return an address by which other machines reach this one."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    pytest.skip("this machine has no address but the loopback's")


def listening(process: subprocess.Popen[str]) -> list[tuple[str, int]]:
    """Return the addresses on which a process and its descendants listen."""
    found = []
    top = psutil.Process(process.pid)
    for each in (top, *top.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            places = [one for one in each.net_connections("inet") if one.status == "LISTEN"]
            found += [(str(one.laddr.ip), int(one.laddr.port)) for one in places]
    return found


@pytest.mark.parametrize("procs", [pytest.param(1, marks=pytest.mark.full), 2])
def test_every_socket_is_closed_to_other_addresses(pipe: Pipe, procs: int) -> None:
    address = outside()
    recipe = pipe.recipe(procs=procs, train={"fault": "hang"})
    set_so = {"GLOO_SOCKET_IFNAME": interface_of(address)}  # as a cluster's profile may set it
    command = ("-m", "pipetrain", "run", str(recipe), "--run-dir", str(pipe.run_dir))
    process = pipe.start(*command, **set_so)
    try:
        pipe.wait_for((pipe.run_dir / "hanging").exists)
        found = listening(process)
        assert len(found) >= procs  # gloo has one for each rank
        for _, port in found:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5)
        assert {ip for ip, _ in found} == {"127.0.0.1"}
    finally:
        process.send_signal(signal.SIGTERM)
        pipe.end(process)


def interface_of(address: str) -> str:
    return next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if address in {one.address for one in addresses}
    )


@pytest.mark.full
@pytest.mark.skipif(bool(network.why_not()), reason=network.why_not())
def test_nodes_listen_at_the_addresses_alone_by_which_they_meet(pipe: Pipe) -> None:
    with network.network(2) as hosts:
        recipe = trials.write_recipe(pipe.folder)
        cluster = trials.Cluster(hosts, recipe, pipe.environment)
        cluster.wait_for_step(3)
        for host in hosts:
            assert host.address in host.listening()
            assert host.listening() <= {host.address, "127.0.0.1"}
        for agent in cluster.agents.values():
            agent.terminate()
        assert [agent.wait(60) for agent in cluster.agents.values()] == [75, 75]
