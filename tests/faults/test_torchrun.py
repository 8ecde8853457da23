"""`pipe run` as the ranks of another launcher."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import network, trials
from tests.support.pipe import Outcome, Pipe
from tests.support.ports import free_port
from tests.support.tiny_recipe import EXPORT, losses, outcome, training, write

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")


def start(
    pipe: Pipe, *arguments: str, restarts: int = 0, **environment: str
) -> subprocess.Popen[str]:
    """Run `torchrun ... -m pipetrain ARGUMENTS` on a free port."""
    port = str(free_port())
    own = ["--max-restarts", str(restarts), "-m", "pipetrain"]
    return pipe.start(*TORCHRUN, port, *own, *arguments, **environment)


def torchrun(pipe: Pipe, *arguments: str) -> Outcome:
    return pipe.end(start(pipe, *arguments))


def test_one_folder_one_voice_and_nothing_to_repeat(pipe: Pipe) -> None:
    runs = pipe.folder / "runs"
    result = torchrun(pipe, "run", str(pipe.recipe(procs=2)), "--runs", str(runs))
    assert result.code == 0, result.stderr
    [folder] = runs.iterdir()
    lines = result.stdout.splitlines()
    assert [line for line in lines if "raw output" in line] == ["raw output of rank 0"]
    assert sum("finished in" in line for line in lines) == 1
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert journal[0]["procs"] == 2
    assert "raw output of rank 1" in (folder / "logs" / "rank-00001.log").read_text()

    again = torchrun(pipe, "resume", str(folder))
    assert again.code == 0, again.stderr
    assert again.stdout.count("nothing to do") == 1
    assert (folder / "calls.txt").read_text().split().count("train") == 1


def test_a_recipe_with_mistakes_is_told_once(pipe: Pipe) -> None:
    result = torchrun(pipe, "run", str(pipe.recipe(train={"ranks": 1})))
    assert result.code == 1
    assert result.stderr.count("train.ranks: unknown field") == 1
    assert (
        "launch.procs: 1 process, but the launcher started 2 (set launch.procs=2" in result.stderr
    )
    assert not (pipe.folder / "runs").exists()


def test_the_rank_that_failed_first_tells(pipe: Pipe) -> None:
    recipe = pipe.recipe(procs=2, train={"fault": "raise", "rank": 1, "peers": "collective"})
    result = torchrun(pipe, "run", str(recipe), "--run-dir", str(pipe.run_dir))
    assert result.code == 1
    assert result.stderr.count("error: rank 1 failed in slot `train`: ValueError: boom\n") == 1
    assert "rank 0 failed" not in result.stderr
    last = pipe.events()[-1]
    assert last["event"] == "run failed"
    assert "ValueError: boom" in last["problem"]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_torchrun_starts_a_run_again_and_it_goes_on(pipe: Pipe, number: signal.Signals) -> None:
    stages = training(checkpoint={"every": 2}, train={"steps": 20}) | EXPORT
    recipe = write(pipe.folder / "recipe.yaml", stages, procs=2)
    calm = pipe.folder / "calm"
    assert pipe("run", str(recipe), "--run-dir", str(calm)).code == 0
    command = ["run", str(recipe), "--run-dir", str(pipe.run_dir)]
    process = start(pipe, *command, restarts=2, READ_SECONDS="0.05")
    pipe.wait_for(lambda: len(losses(pipe.run_dir)) >= 5)
    [rank] = [pid for pid in pids(str(pipe.run_dir)) if environment_of(pid).get("RANK") == "1"]
    os.kill(rank, number)
    result = pipe.end(process)
    assert result.code == 0, result.stderr
    assert outcome(pipe.run_dir, 20) == outcome(calm, 20)


def pids(word: str) -> list[int]:
    """Return the processes whose command lines have a word."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (place / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(place.name))
    return found


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment of a process."""
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_ranks_die_with_a_killed_torchrun(pipe: Pipe) -> None:
    recipe = pipe.recipe(procs=2, train={"fault": "hang", "rank": 1})
    process = start(pipe, "run", str(recipe), "--run-dir", str(pipe.run_dir))
    pipe.wait_for((pipe.run_dir / "hanging").exists)
    process.send_signal(signal.SIGKILL)
    pipe.end(process)
    pipe.wait_for(lambda: not pipe.processes(), limit=5)
    listed = pipe("ls", "--json", str(pipe.folder))
    [run] = json.loads(listed.stdout)
    assert (run["slot"], Path(run["folder"])) == ("train", pipe.run_dir)
    # Linux closes torchrun's store before it kills the ranks, and one of them may have seen that.
    assert run["state"] in ("stopped", "failed")


STATIC = ("--master-addr", "{HOST}", "--master-port", "{PORT}", "--node-rank", "{NUMBER}")
C10D = (
    "--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", "{HOST}:{PORT}",
    "--rdzv-conf", "is_host={FIRST},keep_alive_interval=1,last_call_timeout=3,join_timeout=15",
    "--local-addr", "{OWN}",
)  # fmt: skip
TRIALS = [
    (fault, options, nodes, hosts, seed)
    for fault in (trials.lose_worker, trials.lose_agent_of_a_scheduler)
    for options in (STATIC, C10D)
    for nodes, hosts in (("2", 2), ("3", 3))
    for seed in range(2)
]
TRIALS += [
    (fault, C10D, nodes, hosts, 2)
    for fault in (trials.lose_worker, trials.lose_follower)
    for nodes, hosts in (("1:2", 2), ("2:3", 3))
]


@pytest.mark.full
@pytest.mark.skipif(bool(network.why_not()), reason=network.why_not())
@pytest.mark.parametrize(("fault", "options", "nodes", "hosts", "seed"), TRIALS)
def test_a_fault_of_one_of_several_machines(
    pipe: Pipe, fault: Any, options: tuple[str, ...], nodes: str, hosts: int, seed: int
) -> None:
    """All end: recovered, with every step once, or failed, within a minute. Agents of a c10d
    rendezvous that one has left may wait for each other for five minutes in torch's own code
    (pytorch#147064), without a rank."""
    start = functools.partial(trials.Torchrun, options=options, nodes=nodes)
    environment = pipe.environment | {"GLOO_SOCKET_IFNAME": "eth0"}
    ended = trials.trial(pipe.folder, fault, seed, environment, hosts=hosts, start=start)
    assert ended.ranks == 0
    if options is C10D and fault is trials.lose_agent_of_a_scheduler and None in ended.codes:
        return
    assert None not in ended.codes, ended.said
    assert ended.left == 0
    assert ended.seconds < trials.LIMIT
    recovered = len(ended.steps) == trials.STEPS and bool(ended.weights)
    print(f"TRIAL {fault.__name__} {options[1]} {nodes} {seed}: {ended.codes}, {recovered}")
    assert recovered or 0 not in ended.codes, ended.said
    if recovered:
        assert ended.steps == list(range(1, trials.STEPS + 1))
    if fault is trials.lose_worker or ":" in nodes:
        assert recovered, ended.said
