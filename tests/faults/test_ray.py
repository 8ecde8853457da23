"""Runs under Ray Train on a real cluster of this machine, on which each raylet counts as a node."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.pipe import Pipe
from tests.support.tiny_recipe import EXPORT, losses, outcome, training
from tests.support.waiting import becomes

ray = pytest.importorskip("ray")
LIMIT = 120.0
pytestmark = pytest.mark.filterwarnings(  # files that Ray leaves to the garbage collector
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
LOST = {"resources_per_worker": {"CPU": 1.0}, "max_failures": 30}


def write(pipe: Pipe, wrap: str = "wrap.ddp", steps: int = 20, **launch: Any) -> Path:
    """Write a recipe that saves every five steps, at a rate at which rounding does not grow."""
    stages = training(wrap=wrap, checkpoint={"every": 5, "keep": 2}, train={"steps": steps})
    stages["optimizer"]["lr"] = 1e-5
    path = pipe.folder / f"{'-'.join(launch)}.yaml"
    head = {"name": "tiny", "launch": {"device": "cpu", **launch}}
    path.write_text(json.dumps(head | {"stages": stages | EXPORT}))
    return path


def calm(pipe: Pipe, procs: int, wrap: str = "wrap.ddp", steps: int = 20) -> Path:
    """Return the folder of an undisturbed run of as many ranks of one machine."""
    run = pipe.folder / "calm"
    recipe = write(pipe, wrap, steps, procs=procs)
    assert pipe("run", str(recipe), "--run-dir", str(run)).code == 0
    return run


def start(pipe: Pipe, recipe: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = ("-m", "pipetrain", "run", str(recipe), "--run-dir", str(pipe.run_dir))
    return pipe.start(*command, "--engine", "ray", *options, **environment)


def processes(pipe: Pipe, name: str) -> list[psutil.Process]:
    """Return the run's processes of a name: ranks, or Ray's workers that have started them."""
    ranks = [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"pipeline.execution.worker", str(pipe.run_dir)} <= {*(process.info["cmdline"] or ())}
    ]
    return ranks if name == "rank" else [rank.parent() for rank in ranks]


def wait_for_step(pipe: Pipe, step: int) -> None:
    assert becomes(lambda: ([0] + [n for n, _ in losses(pipe.run_dir)])[-1] >= step, LIMIT)


@pytest.fixture
def cluster(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """A cluster of two nodes with two cores each; no process of it is left. Its parameter is the
    time of a read of the data."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", pipe.environment["PYTHONPATH"])
    monkeypatch.setenv("READ_SECONDS", getattr(request, "param", "0.05"))
    notice = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
    head = {"num_cpus": 2, "_system_config": notice}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.add_node(num_cpus=2)
        yield made
    finally:
        made.shutdown()
        for process in psutil.process_iter():  # Ray's own, of raylets that a test has killed
            if process.name() in ("ray::DashboardAgent", "ray::RuntimeEnvAgent"):
                process.kill()
    assert becomes(lambda: not rays(), 30), rays()


def rays() -> list[str]:
    """Return the names of Ray's processes on this machine."""
    there = psutil.process_iter(["name", "status"])
    found = [one.info["name"] for one in there if one.info["status"] != psutil.STATUS_ZOMBIE]
    return [name for name in found if name in ("raylet", "gcs_server") or name.startswith("ray::")]


def test_the_numbers_are_those_of_one_machine(pipe: Pipe) -> None:
    found = pipe.end(start(pipe, write(pipe, procs=2)))
    assert found.code == 0, found
    assert outcome(pipe.run_dir, 20) == outcome(calm(pipe, 2), 20)
    assert becomes(lambda: not rays(), 30), rays()
    reported = (pipe.run_dir / "checkpoint_manager_snapshot.json").read_text()
    assert "checkpoints/step-" in reported
    assert "loss" in reported


@pytest.mark.full
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("wrap", ["wrap.ddp", "wrap.fsdp", "wrap.zero"])
def test_every_strategy_on_two_nodes(pipe: Pipe, cluster: Any, wrap: str, workers: int) -> None:
    found = pipe.end(start(pipe, write(pipe, wrap, workers=workers), "--address", cluster.address))
    assert found.code == 0, found
    assert outcome(pipe.run_dir, 20) == outcome(calm(pipe, workers, wrap), 20)


@pytest.mark.full
def test_lost_workers(pipe: Pipe, cluster: Any) -> None:
    """Twenty times one of two is killed: the worker of Ray, or the rank that it has started."""
    chance, steps = random.Random(0), 150
    process = start(pipe, write(pipe, steps=steps, workers=2, **LOST), "--address", cluster.address)
    for kill in range(20):
        wait_for_step(pipe, 6 * kill + chance.randrange(1, 6))
        there = len(losses(pipe.run_dir))
        chance.choice(processes(pipe, chance.choice(["rank", "worker"]))).kill()
        assert becomes(lambda there=there: len(losses(pipe.run_dir)) > there, LIMIT), kill
    found = pipe.end(process)
    assert found.code == 0, found
    restarts = [event["restart"] for event in pipe.events() if "restart" in event]
    assert restarts == list(range(1, 21))
    assert outcome(pipe.run_dir, steps) == outcome(calm(pipe, 2, steps=steps), steps)


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["0.3"], indirect=True)
def test_lost_nodes_of_an_elastic_run(pipe: Pipe, cluster: Any) -> None:
    """Six times a raylet is killed and another comes: four workers, two, and four again."""
    steps, workers = 400, {"min": 2, "max": 4, "look_every": 5}
    recipe = write(pipe, "wrap.fsdp", steps, workers=workers, **LOST)
    process = start(pipe, recipe, "--address", cluster.address)
    for kill in range(6):
        sizes(pipe, 4)
        there = len(losses(pipe.run_dir))
        assert becomes(lambda there=there: len(losses(pipe.run_dir)) > there + 3, LIMIT), kill
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        sizes(pipe, 2)
        there = len(losses(pipe.run_dir))
        assert becomes(lambda there=there: len(losses(pipe.run_dir)) > there, LIMIT), kill
        cluster.add_node(num_cpus=2)
    found = pipe.end(process)
    assert found.code == 0, found
    used = [event["procs"] for event in pipe.events() if event["event"] == "run started"]
    assert used[:13] == [4, 2] * 6 + [4], used
    _, own = outcome(pipe.run_dir, steps)
    _, undisturbed = outcome(calm(pipe, 4, "wrap.fsdp", steps), steps)
    assert own == pytest.approx(undisturbed, rel=1e-6)


def sizes(pipe: Pipe, size: int) -> None:
    """Wait until the newest attempt has so many workers."""

    def newest() -> int:
        return int(
            [event["procs"] for event in pipe.events() if event["event"] == "run started"][-1]
        )

    assert becomes(lambda: (pipe.run_dir / "journal.jsonl").exists() and newest() == size, LIMIT)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_loses_no_step(pipe: Pipe, number: signal.Signals) -> None:
    recipe = write(pipe, procs=2)
    process = start(pipe, recipe, READ_SECONDS="0.05")
    wait_for_step(pipe, 3)
    process.send_signal(number)
    found = pipe.end(process)
    assert found.code == 75, found
    assert f"stopped by {number.name}" in found.stderr
    assert becomes(lambda: not rays(), 30), rays()
    stopped = losses(pipe.run_dir)[-1][0]
    assert (pipe.run_dir / "checkpoints" / f"step-{stopped:08d}").is_dir()
    resumed = pipe("resume", str(pipe.run_dir), "--engine", "ray")
    assert resumed.code == 0, resumed
    assert outcome(pipe.run_dir, 20) == outcome(calm(pipe, 2), 20)


@pytest.mark.full
def test_a_killed_command_leaves_no_process(pipe: Pipe) -> None:
    process = start(pipe, write(pipe, procs=2), READ_SECONDS="0.05")
    wait_for_step(pipe, 3)
    process.kill()
    pipe.end(process)
    assert becomes(lambda: not pipe.processes(), 30)
    assert becomes(lambda: not rays(), 180), rays()  # its agents notice late


@pytest.mark.full
def test_an_error_that_comes_again_is_not_repeated(pipe: Pipe, cluster: Any) -> None:
    recipe = pipe.recipe(procs=2, launch={"engine": "ray"}, train={"fault": "raise", "rank": 1})
    found = pipe.end(start(pipe, recipe, "--address", cluster.address))
    assert found.code == 1, found
    assert "rank 1 failed in slot `train`: ValueError: boom" in found.stderr
    assert sum(event["event"] == "run started" for event in pipe.events()) == 1


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["0.3"], indirect=True)
def test_a_node_that_is_to_be_taken_away_loses_no_step(pipe: Pipe, cluster: Any) -> None:
    steps, workers = 120, {"min": 2, "max": 4, "look_every": 600}
    recipe = write(pipe, steps=steps, workers=workers, **LOST)
    process = start(pipe, recipe, "--address", cluster.address)
    wait_for_step(pipe, 6)
    node = cluster.list_all_nodes()[-1].node_id
    drain(cluster.address, node)
    sizes(pipe, 2)
    seen = losses(pipe.run_dir)
    found = pipe.end(process)
    assert found.code == 0, found
    assert [step for step, _ in losses(pipe.run_dir)][: len(seen)] == [step for step, _ in seen]
    _, own = outcome(pipe.run_dir, steps)
    assert own == pytest.approx(outcome(calm(pipe, 4, steps=steps), steps)[1], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["0.3"], indirect=True)
@pytest.mark.parametrize("seconds", [0, 4, 12])
def test_a_stop_while_a_node_is_taken_away_loses_no_step(
    pipe: Pipe, cluster: Any, seconds: int
) -> None:
    """However far the ranks have come with what the notice asks of them."""
    process = start(pipe, write(pipe, steps=120, workers=4), "--address", cluster.address)
    wait_for_step(pipe, 6)
    drain(cluster.address, cluster.list_all_nodes()[-1].node_id, 90)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    found = pipe.end(process, 60)
    assert found.code == 75, found
    stopped = losses(pipe.run_dir)[-1][0]
    assert (pipe.run_dir / "checkpoints" / f"step-{stopped:08d}").is_dir()


def drain(address: str, node: str, seconds: int = 20) -> None:
    """Tell Ray that a node is taken away in so many seconds."""
    options = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    command = ["drain-node", "--address", address, "--node-id", node, *options]
    program = [sys.executable, "-m", "ray.scripts.scripts", *command]
    subprocess.run([*program, "--deadline-remaining-seconds", str(seconds)], check=True)


@pytest.mark.full
def test_ray_job_stop(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of `pipe launch` gives the command time to save, and variables of the recipe."""
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobStatus, JobSubmissionClient

    monkeypatch.setenv("PYTHONPATH", pipe.environment["PYTHONPATH"])
    monkeypatch.setenv("READ_SECONDS", "0.05")
    head = {"num_cpus": 4, "include_dashboard": True, "dashboard_port": 18265}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        where = {"RAY_ADDRESS": "http://127.0.0.1:18265", "SHAPE": "constant"}
        recipe = write(pipe, procs=2)
        text = recipe.read_text().replace('"constant"', '"${oc.env:SHAPE}"')
        recipe.write_text(text.replace('"launch"', '"env": ["SHAPE"], "launch"'))
        options = ("--print", "--run-dir", str(pipe.run_dir), "--grace", "60")
        script = pipe("launch", str(recipe), "--target", "ray", *options, **where)
        assert script.code == 0, script
        program = script.stdout.replace("-- pipe", f"-- {sys.executable} -m pipetrain")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        there = pipe.environment | where | {"PATH": path}
        subprocess.run(["bash"], input=program, env=there, text=True, check=True)
        client = JobSubmissionClient(where["RAY_ADDRESS"])
        [job] = client.list_jobs()
        wait_for_step(pipe, 3)
        client.stop_job(job.submission_id)
        ended = JobStatus.STOPPED
        assert becomes(lambda: client.get_job_status(job.submission_id) == ended, 60)
    finally:
        cluster.shutdown()
    stopped = losses(pipe.run_dir)[-1][0]
    assert (pipe.run_dir / "checkpoints" / f"step-{stopped:08d}").is_dir()
    assert pipe.events()[-1]["event"] == "run stopped"
