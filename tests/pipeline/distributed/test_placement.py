"""Options and hostfiles over what launchers say."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from pipeline.distributed.placement import (
    NodeOptions,
    NodePlacement,
    Placement,
    RankPlacement,
    combined,
    own_rank,
    read_hostfile,
)
from pipeline.errors import UsageError

OPTIONS = NodeOptions(nodes="2", node_rank=1, rdzv="n0:1234")
CLOUD = NodePlacement(source="SkyPilot", node_rank=1, nodes=2, host="10.0.0.1", port=29400, procs=8)
RANK = RankPlacement(
    source="Slurm", rank=3, world_size=4, local_rank=1, local_world_size=2, host="n0", port=1
)


def found(options: NodeOptions, launcher: Placement | None = None) -> dict[str, Any]:
    """Return the fields of the node that is found."""
    place = combined(options, launcher)
    assert isinstance(place, NodePlacement)
    return vars(place)


def test_options_by_themselves() -> None:
    assert found(OPTIONS) == {
        "source": "options", "node_rank": 1, "nodes": 2, "host": "n0", "port": 1234,
        "procs": None, "job": "", "by_hand": True,
    }  # fmt: skip
    assert combined(NodeOptions(), None) is None
    other = found(NodeOptions(nodes="4", node_rank=3, rdzv="[fd00::1]:99"))
    assert (other["nodes"], other["host"], other["port"]) == (4, "fd00::1", 99)


@pytest.mark.parametrize(
    ("rdzv", "said"),
    [("node0", True), ("[fd00::1]", True), ("node0:29400", False), ("[fd00::1]:29400", False)],
)
def test_a_port_that_is_assumed_is_said(
    capsys: pytest.CaptureFixture[str], rdzv: str, said: bool
) -> None:
    assert found(NodeOptions(nodes="2", node_rank=1, rdzv=rdzv))["port"] == 29400
    line = f"--rdzv {rdzv} names no port: using 29400\n"
    assert capsys.readouterr().err == (line if said else "")


def test_options_add_to_a_launcher() -> None:
    assert found(NodeOptions(rdzv="ib0"), CLOUD) == vars(CLOUD) | {"host": "ib0"}


@pytest.mark.parametrize(
    ("options", "launcher", "words"),
    [
        (NodeOptions(nodes="2"), None, "--node-rank, --rdzv not given, and no "
         "launcher or hostfile"),
        (NodeOptions(nodes="x", node_rank=0, rdzv="h:1"), None, "--nodes=x is not a number"),
        (NodeOptions(nodes="2", node_rank=0, rdzv="h:x"), None, "--rdzv=h:x is not HOST:PORT"),
        (NodeOptions(nodes="0", node_rank=0, rdzv="h:1"), None, "--nodes=0 is not a number"),
        (NodeOptions(nodes="2", node_rank=3, rdzv="h:1"), None, "--node-rank must be 0 or 1, as "
         "there are 2 nodes"),
        (NodeOptions(nodes="4", node_rank=4, rdzv="h:1"), None, "--node-rank must be from 0 to 3"),
        (NodeOptions(nodes="3"), CLOUD, "node 1 of 3 (the options) contradicts node 1 of 2 "
         "(SkyPilot)"),
        (NodeOptions(node_rank=0), CLOUD, "node 0 of 2 (the options) contradicts node 1 of 2"),
        (OPTIONS, RANK, "this process is rank 3 of 4 (Slurm), so --nodes"),
    ],
)  # fmt: skip
def test_options_against_launchers(
    options: NodeOptions, launcher: Placement | None, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        combined(options, launcher)
    assert words in str(caught.value)


def test_a_hostfile_says_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\n\nworker-1 slots=4  # fast\n  worker-2   slots = 4\n")
    options = NodeOptions(hostfile=file, node_rank=1)
    here = {"source": str(file), "host": "worker-1", "procs": 4, "by_hand": True}
    assert found(options) == vars(CLOUD) | here
    with pytest.raises(UsageError, match=r"node 1 of 2 \(.*hosts\) contradicts node 0 of 2"):
        combined(options, NodePlacement(**vars(CLOUD) | {"node_rank": 0}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "hosts: no host in the file (a line reads: worker-1 slots=8)"),
        ("a\n", "hosts:1: `a` does not read like: worker-1 slots=8"),
        ("a slots=2\nb slots=0\n", "hosts:2: `b slots=0` does not read like"),
        ("a slots=2\na slots=2\n", "hosts:2: a occurs twice"),
        ("a slots=2\n#\nb slots=4\n", "hosts:3: b has 4 slots, but a has 2: all nodes need"),
        (None, "No such file"),
    ],
)
def test_mistakes_in_a_hostfile(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_hostfile(tmp_path / "hosts")
    assert words in str(caught.value)


def test_this_machine_among_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-2.cluster")
    monkeypatch.setattr("pipeline.distributed.placement.addresses_of", lambda _: set())
    file = Path("hosts")
    assert own_rank(file, ["worker-1", "worker-2"]) == 1
    assert own_rank(file, ["a", "b", "127.0.0.1"]) == 2
    with pytest.raises(UsageError, match=r"worker-2\.cluster, is none of the hosts in hosts: a, b"):
        own_rank(file, ["a", "b"])
    with pytest.raises(UsageError, match=r"is several of the hosts"):
        own_rank(file, ["worker-2", "127.0.0.1"])
