"""Runs of two nodes, both of which are this machine."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.execution import failures
from tests.support.pipe import Forked, Outcome, Pipe
from tests.support.ports import free_port
from tests.support.tiny_recipe import losses, training

Start = Callable[..., list[Forked]]


@pytest.fixture
def start(pipe: Pipe, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start a recipe on two nodes."""

    def both(recipe: Path) -> list[Forked]:
        where = f"127.0.0.1:{free_port()}"
        command = ("run", str(recipe), "--run-dir", str(pipe.run_dir), "--nodes", "2")
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


@pytest.mark.full
def test_a_node_that_wakes_when_another_has_its_place_is_refused(
    pipe: Pipe, tmp_path_factory: pytest.TempPathFactory
) -> None:
    recipe = tiny(pipe, timeouts={"node": 5, "rendezvous": 60})
    command = ("run", str(recipe), "--run-dir", str(pipe.run_dir), "--nodes", "2")
    where = ("--rdzv", f"127.0.0.1:{free_port()}", "--node-rank")

    def node(rank: str) -> Forked:
        return pipe.fork(tmp_path_factory.mktemp("said"), *command, *where, rank)

    first, frozen = node("0"), node("1")
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 2)
    agent = psutil.Process(frozen.pid)
    asleep = [agent, *agent.children(recursive=True)]
    for process in asleep:
        process.suspend()
    other = node("1")
    pipe.wait_for(lambda: any(event.get("restart") for event in pipe.events()))
    there = len(losses(pipe.run_dir))
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) > there)
    for process in asleep:
        process.resume()
    ended = frozen.end()
    assert ended.code == 2, ended
    assert "node rank 1 is taken by node 1 (" in ended.stderr
    other.send(signal.SIGTERM)
    assert [one.code for one in ends([first, other])] == [75, 75]


def test_a_folder_that_everybody_can_write_in_is_run_by_no_node(pipe: Pipe, start: Start) -> None:
    """Node 0 may be somebody else where nodes share no secret."""
    pipe.run_dir.mkdir()
    (pipe.folder / "group").touch()
    nodes = start(tiny(pipe))
    pipe.wait_for((pipe.run_dir / "recipe.yaml").exists)
    pipe.run_dir.chmod(0o777)
    found = ends(nodes)
    assert [node.code for node in found] == [1, 1], found
    assert f"everybody can write in {pipe.run_dir}" in found[1].stderr


def test_another_recipe_of_a_node_ends_the_run_with_both_machines(
    pipe: Pipe, tmp_path_factory: pytest.TempPathFactory
) -> None:
    recipe, where = tiny(pipe), f"127.0.0.1:{free_port()}"
    command = ("run", str(recipe), "--run-dir", str(pipe.run_dir), "--nodes", "2", "--rdzv", where)
    said = [tmp_path_factory.mktemp("said") for _ in range(2)]
    nodes = [
        pipe.fork(said[0], *command, "--node-rank", "0"),
        pipe.fork(said[1], *command, "--node-rank", "1", "optimizer.lr=0.3"),
    ]
    found = ends(nodes)
    assert [node.code for node in found] == [1, 1], found
    words = f"node 1 ({socket.gethostname()}): this node's recipe is not node 0's: "
    words += "optimizer.lr is 0.3 here, 0.01 on node 0 (127.0.0.1)"
    assert all(words in node.stderr for node in found), found
    assert not losses(pipe.run_dir)


def own_address() -> str:
    """Return an address of this machine which others may reach."""
    return next(
        found.address
        for found in itertools.chain.from_iterable(psutil.net_if_addrs().values())
        if found.family == socket.AF_INET and not found.address.startswith("127.")
    )


def test_under_a_launcher_no_node_makes_a_token(pipe: Pipe) -> None:
    """No one would see it, but for who reads the log."""
    found = pipe(
        "run", str(tiny(pipe)), "--run-dir", str(pipe.run_dir),
        PET_NNODES="2", PET_NODE_RANK="0", PET_MASTER_ADDR=own_address(),
    )  # fmt: skip
    assert found.code == 2, found
    assert "PIPE_RDZV_TOKEN is not set, so whoever reaches" in found.stderr
    assert not pipe.run_dir.exists()


def test_only_node_0_makes_a_token_and_prints_the_command_for_the_others(
    pipe: Pipe, tmp_path: Path
) -> None:
    address = own_address()
    where = ("--nodes", "2", "--rdzv", f"{address}:{free_port()}")
    command = ("run", str(tiny(pipe)), "--run-dir", str(pipe.run_dir), *where)
    refused = pipe(*command, "--node-rank", "1")
    assert refused.code == 2, refused
    assert f"error: PIPE_RDZV_TOKEN is not set, so whoever reaches node 0 at {address}" in (
        refused.stderr
    )
    assert not pipe.run_dir.exists()
    first = pipe.fork(tmp_path, *command, "--node-rank", "0")
    said = tmp_path / "stderr"
    pipe.wait_for(lambda: said.exists() and "--node-rank NUMBER" in said.read_text())
    [printed] = [line for line in said.read_text().splitlines() if "NUMBER" in line]
    given, *words = shlex.split(printed)
    name, _, secret = given.partition("=")
    assert (name, words[:2], len(secret)) == ("PIPE_RDZV_TOKEN", ["pipe", "run"], 32)
    other = pipe.fork(
        tmp_path.parent, *(word.replace("NUMBER", "1") for word in words[1:]), **{name: secret}
    )
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 2)
    first.send(signal.SIGTERM)
    assert [node.code for node in ends([first, other])] == [75, 75]
    journal = (pipe.run_dir / "journal.jsonl").read_text()
    assert secret not in journal


def test_a_number_of_nodes_that_changes_is_of_engines(pipe: Pipe) -> None:
    command = ("run", str(tiny(pipe)), "--nodes", "1:2", "--rdzv", "127.0.0.1", "--node-rank", "0")
    found = pipe(*command)
    assert found.code == 2
    assert "--nodes=1:2: nodes that `pipe` starts are a fixed number" in found.stderr
    assert "and torchrun (--nnodes 2:4) continue with fewer" in found.stderr


BROKEN = """
from pathlib import Path
from pipeline.launch.rounds import Rounds

look = Rounds._look_at_round

def broken(self, now):
    if Path("broken").exists():
        raise KeyError("unexpected")
    look(self, now)

Rounds._look_at_round = broken
"""
"""Breaks node 0's decisions once there is a file of that name."""


def test_nothing_waits_for_decisions_that_are_broken(pipe: Pipe, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    path = os.pathsep.join([str(tmp_path), pipe.environment["PYTHONPATH"]])
    recipe = tiny(pipe, timeouts={"node": 4, "rendezvous": 20})
    command = ("-m", "pipetrain", "run", str(recipe), "--run-dir", str(pipe.run_dir))
    options = ("--nodes", "2", "--rdzv", f"127.0.0.1:{free_port()}", "--node-rank")
    nodes = [pipe.start(*command, *options, str(n), PYTHONPATH=path) for n in range(2)]
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 2)
    (pipe.folder / "broken").touch()
    found = [pipe.end(node, limit=100) for node in nodes]
    assert [node.code for node in found] == [1, 1], found
    assert "error: node 0 cannot take part any more: KeyError: 'unexpected'" in found[0].stderr
    assert "node 0 has not answered at 127.0.0.1:" in found[1].stderr
    assert all("Traceback" not in node.stderr for node in found), found
