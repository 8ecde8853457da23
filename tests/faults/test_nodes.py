"""Runs of two nodes, both of which are this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.distributed.settings import Attempts, Restarts
from pipeline.execution import failures
from pipeline.execution.run_spec import RunSpec
from pipeline.launch.coordinator import Coordinator
from pipeline.launch.exchange import Link, Server
from pipeline.launch.messages import Beat
from tests.support.pipe import Forked, Outcome, Pipe
from tests.support.ports import free_port
from tests.support.tiny_recipe import losses, training

Start = Callable[..., list[Forked]]


@pytest.fixture
def start(pipe: Pipe, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start a recipe on two nodes."""

    def both(recipe: Path, nodes: str = "2") -> list[Forked]:
        where = f"127.0.0.1:{free_port()}"
        command = ("run", str(recipe), "--run-dir", str(pipe.run_dir), "--nodes", nodes)
        said = [tmp_path_factory.mktemp("said") for _ in range(2)]
        return [
            pipe.fork(said[n], *command, "--rdzv", where, "--node-rank", str(n)) for n in range(2)
        ]

    return both


def ends(nodes: Sequence[Forked]) -> list[Outcome]:
    """Return how all nodes have ended."""
    return [node.end() for node in nodes]


def tiny(pipe: Pipe, **settings: Any) -> Path:
    """Write a recipe of a training that takes a while, of one rank a node."""
    stages = training(checkpoint={"every": 1000}, train={"steps": 2000, "micro_batch_size": 1})
    path = pipe.folder / "tiny.yaml"
    launch = {"procs": 1, "device": "cpu", **settings}
    path.write_text(json.dumps({"name": "tiny", "launch": launch, "stages": stages}))
    return path


def test_nodes_of_a_run_that_has_finished_have_nothing_to_do(pipe: Pipe, start: Start) -> None:
    recipe = pipe.recipe()
    assert pipe.run(recipe).code == 0
    calls = pipe.calls()
    nodes = ends(start(recipe))
    assert [node.code for node in nodes] == [0, 0], nodes
    assert "\nnothing to do: every stage has finished\n" in nodes[0].stdout
    assert pipe.calls() == calls


def test_a_stop_is_told_with_the_node_that_got_the_signal(pipe: Pipe, start: Start) -> None:
    nodes = start(tiny(pipe))
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 2)
    nodes[1].send(signal.SIGUSR1)
    found = ends(nodes)
    assert [node.code for node in found] == [75, 75], found
    assert all("stopped by SIGUSR1 to node 1 (" in node.stderr for node in found), found
    assert failures.ON_EVERY_NODE in found[0].stderr
    assert "pipe resume" not in found[0].stderr
    assert pipe.events()[-1]["event"] == "run stopped"


def test_a_rank_that_dies_while_its_node_stops_is_a_failure(pipe: Pipe, start: Start) -> None:
    nodes = start(tiny(pipe))
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 2)
    (rank,) = (
        child.pid for child in psutil.Process(nodes[1].pid).children()
        if any(place.path.endswith("rank-00001.log") for place in child.open_files())
    )  # fmt: skip
    os.kill(rank, signal.SIGSTOP)
    nodes[1].send(signal.SIGTERM)
    time.sleep(0.5)
    os.kill(rank, signal.SIGKILL)
    found = ends(nodes)
    assert [node.code for node in found] == [1, 1], found
    assert all("rank 1" in node.stderr for node in found), found
    assert pipe.events()[-1]["event"] == "run failed"


def test_an_elastic_run_loses_a_node_before_its_first_checkpoint(pipe: Pipe, start: Start) -> None:
    """The rank that is left raises an error at once, before the node is known to be lost."""
    recipe = tiny(pipe, timeouts={"node": 4}, restarts={"backoff": 0})
    nodes = start(recipe, "1:2")
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 2)
    nodes[1].send(signal.SIGKILL)
    nodes[1].end()
    pipe.wait_for(lambda: any("restart" in event for event in pipe.events()), limit=60)
    before = len(losses(pipe.run_dir))
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) > before, limit=60)
    nodes[0].send(signal.SIGTERM)
    found = nodes[0].end()
    assert found.code == 75, found
    assert re.search(r"node 1 \(.+, 127.0.0.1\) was lost: no sign of life for 4 s", found.stderr)
    restarted = next(event for event in pipe.events() if "restart" in event)
    assert (restarted["restart"], restarted["procs"]) == (1, 2)


def test_a_folder_that_everybody_can_write_in_is_run_by_no_node(pipe: Pipe, tmp_path: Path) -> None:
    """Node 0 may be somebody else where nodes share no secret."""
    recipe = tiny(pipe)
    pipe.run_dir.mkdir()
    pipe.run_dir.chmod(0o777)
    (pipe.run_dir / "recipe.yaml").write_text(recipe.read_text())
    running = Coordinator(
        fewest=2, most=2, attempts=Attempts(Restarts()), rendezvous_seconds=60, run="tiny",
        spec=RunSpec(run_dir=str(pipe.run_dir), recipe={}).dump(),
    )  # fmt: skip
    with Server(running, "127.0.0.1", 0) as server:
        port = server._http.server_address[1]
        with Link(
            "127.0.0.1", port, Beat(agent="x", run="tiny", node=0, host="h", procs=1, port=1)
        ):
            command = ("run", str(recipe), "--nodes", "2", "--rdzv", f"127.0.0.1:{port}")
            found = pipe.fork(tmp_path, *command, "--node-rank", "1").end()
    assert found.code == 1, found
    assert f"everybody can write in {pipe.run_dir}" in found.stderr
    assert not (pipe.run_dir / "logs").exists()


def test_nodes_without_a_secret_listen_to_nobody(pipe: Pipe, tmp_path: Path) -> None:
    """Node 0 refuses before it makes a folder, the other before it waits for node 0."""
    recipe = tiny(pipe)
    for node, host in enumerate(("0.0.0.0", "192.0.2.1")):
        where = ("--nodes", "2", "--rdzv", f"{host}:{free_port()}", "--node-rank", str(node))
        found = pipe("run", str(recipe), "--run-dir", str(pipe.run_dir), *where)
        assert found.code == 2, found
        assert f"error: PIPE_RDZV_TOKEN is not set, so whoever reaches node 0 at {host}" in (
            found.stderr
        )
        assert "set PIPE_RDZV_TOKEN to it on every node" in found.stderr
    assert not pipe.run_dir.exists()


BROKEN = """
from pathlib import Path
from pipeline.launch.coordinator import Coordinator

look = Coordinator._look_at_round

def broken(self, now):
    if Path("broken").exists():
        raise KeyError("unexpected")
    look(self, now)

Coordinator._look_at_round = broken
"""
"""Breaks the coordinator of a process once there is a file of that name."""


def test_nothing_waits_for_a_coordinator_that_is_broken(pipe: Pipe, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    path = os.pathsep.join([str(tmp_path), pipe.environment["PYTHONPATH"]])
    command = ("-m", "pipetrain", "run", str(tiny(pipe)), "--run-dir", str(pipe.run_dir))
    options = ("--nodes", "2", "--rdzv", f"127.0.0.1:{free_port()}", "--node-rank")
    nodes = [pipe.start(*command, *options, str(n), PYTHONPATH=path) for n in range(2)]
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 2)
    (pipe.folder / "broken").touch()
    found = [pipe.end(node, limit=100) for node in nodes]
    assert [node.code for node in found] == [1, 1], found
    for node in found:
        assert "error: node 0 cannot take part any more: KeyError: 'unexpected'" in node.stderr
        assert "Traceback" not in node.stderr
