"""Runs of two nodes, both of which are this machine."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

from tests.support.pipe import Outcome, Pipe


def run_nodes(pipe: Pipe, recipe: Path) -> list[Outcome]:
    """Run the recipe on two nodes to their ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    command = ("run", str(recipe), "--run-dir", str(pipe.run_dir), "--nodes", "2", "--rdzv", where)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        places = enumerate((Path(first), Path(second)))
        nodes = [pipe.fork(place, *command, "--node-rank", str(n)) for n, place in places]
        return [node.end() for node in nodes]


def test_nodes_of_a_run_that_has_finished_have_nothing_to_do(pipe: Pipe) -> None:
    recipe = pipe.recipe()
    assert pipe.run(recipe).code == 0
    calls = pipe.calls()
    nodes = run_nodes(pipe, recipe)
    assert [node.code for node in nodes] == [0, 0], nodes
    assert "\nnothing to do: every stage has finished\n" in nodes[0].stdout
    assert pipe.calls() == calls
