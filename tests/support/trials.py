"""One fault of a run on several hosts, and what becomes of the run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contracts.metrics import records
from pipeline.distributed.environment import TOKEN
from tests.support.network import Host, network
from tests.support.tiny_recipe import EXPORT, training
from tests.support.waiting import becomes

STEPS = 40
LIMIT = 60.0
"""Seconds after a fault in which a run recovers, or fails cleanly."""
PORT = 29400


@dataclass(frozen=True, kw_only=True)
class Ended:
    codes: list[int | None]
    """Exit codes of the nodes; None for one that had not ended."""
    seconds: float
    """Seconds from the fault, or from the return of a lost host, to the end."""
    steps: list[int]
    """Steps in the order of metrics.jsonl."""
    weights: bytes
    """The exported model; empty without one."""
    left: int
    """Processes that were left; of these, ranks."""
    ranks: int
    said: str
    """Output of node 0."""


def write_recipe(
    folder: Path, *, procs: int = 1, wrap: str = "wrap.ddp", rendezvous: float = 25
) -> Path:
    """Write a recipe that saves every five steps and is started again at once."""
    stages = training(wrap=wrap, checkpoint={"every": 5, "keep": 2}, train={"steps": STEPS})
    launch = {
        "procs": procs,
        "device": "cpu",
        "restarts": {"backoff": 0.5},
        "timeouts": {"rendezvous": rendezvous},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"name": "tiny", "launch": launch, "stages": stages | EXPORT}))
    return path


class Cluster:
    """A run on several hosts."""

    def __init__(
        self, hosts: Sequence[Host], recipe: Path, environment: dict[str, str],
        late: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Start all hosts but the `late` ones."""
        self.hosts, self.recipe = hosts, recipe
        self.run_dir = recipe.parent / "run"
        self.environment = environment | {"READ_SECONDS": "0.05", TOKEN: "of this cluster"}
        self.disturbed = 0.0
        self.agents: dict[int, subprocess.Popen[str]] = {}
        for number in range(len(hosts)):
            if number not in late:
                self.start(number)

    def start(self, number: int, *overrides: str, **environment: str | None) -> None:
        """Start the agent of a host, with changes to its recipe and its environment."""
        changed = self.environment | environment
        own = {name: value for name, value in changed.items() if value is not None}
        with self.said(number).open("a") as output:
            command = [sys.executable, *self.command(number, *overrides)]
            self.agents[number] = self.hosts[number].start(command, own, output)

    def command(self, number: int, *overrides: str) -> list[str]:
        """Return what Python is to do on a host."""
        where = ["--node-rank", str(number), "--rdzv", f"{self.hosts[0].address}:{PORT}"]
        nodes = ["--nodes", str(len(self.hosts))]
        return ["-m", "pipetrain", *self.run(*overrides), *nodes, *where]

    def run(self, *overrides: str) -> list[str]:
        """Return the command of `pipe`, without where this host is."""
        return ["run", str(self.recipe), *overrides, "--run-dir", str(self.run_dir)]

    def again(self, number: int) -> None:
        """Start the agent of a host anew once it is gone, as a scheduler does."""
        self.agents[number].wait(LIMIT)
        self.start(number)

    def said(self, number: int) -> Path:
        """Return the file with a host's output."""
        return self.recipe.parent / f"said-{number}"

    def steps(self) -> list[int]:
        """Return the steps so far."""
        return [r["step"] for r in records(self.run_dir / "metrics.jsonl") if "loss" in r]

    def wait_for_step(self, step: int) -> None:
        """Wait until training has come to a step."""
        come = becomes(lambda: (self.steps() or [0])[-1] >= step, LIMIT)
        assert come, self.said(0).read_text()

    def ranks(self, number: int) -> list[int]:
        """Return the processes of a host's ranks."""
        return [
            pid
            for pid in self.hosts[number].processes()
            if "pipeline.execution.worker" in line(pid)
        ]

    def agent(self, number: int) -> int:
        """Return the process of a host's agent."""
        return next(pid for pid in self.hosts[number].processes() if "pipetrain run" in line(pid))

    def end(self) -> Ended:
        """Wait for all agents, and look at what they leave."""
        codes: list[int | None] = []
        for _, agent in sorted(self.agents.items()):
            try:
                codes.append(agent.wait(max(0.1, self.disturbed + LIMIT - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        seconds = time.monotonic() - self.disturbed
        model = self.run_dir / "export" / "model.safetensors"
        return Ended(
            codes=codes,
            seconds=seconds,
            steps=self.steps(),
            weights=model.read_bytes() if model.exists() else b"",
            left=sum(len(host.processes()) for host in self.hosts),
            ranks=sum(len(self.ranks(number)) for number in range(len(self.hosts))),
            said=self.said(0).read_text(),
        )


class Torchrun(Cluster):
    """The same under torchrun, with a rank on each host."""

    def __init__(self, *given: Any, options: Sequence[str], nodes: str, **more: Any) -> None:
        self.options, self.nodes = options, nodes
        super().__init__(*given, **more)

    def command(self, number: int, *overrides: str) -> list[str]:
        first = self.hosts[0].address
        places = {
            "HOST": first, "PORT": str(PORT), "NUMBER": str(number), "FIRST": str(int(number == 0)),
            "OWN": self.hosts[number].address,
        }  # fmt: skip
        own = [option.format(**places) for option in self.options]
        program = ["-m", "torch.distributed.run", "--nnodes", self.nodes, "--nproc-per-node", "1"]
        return [*program, *own, "--max-restarts", "3", "-m", "pipetrain", *self.run(*overrides)]

    def ranks(self, number: int) -> list[int]:
        pids = self.hosts[number].processes()
        return [
            pid
            for pid in pids
            if "pipetrain run" in line(pid) and "distributed.run" not in line(pid)
        ]

    def agent(self, number: int) -> int:
        return next(pid for pid in self.hosts[number].processes() if "distributed.run" in line(pid))


def line(pid: int) -> str:
    """Return the command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def trial(
    folder: Path,
    fault: Callable[[Cluster, random.Random], None],
    seed: int,
    environment: dict[str, str],
    *,
    hosts: int = 2,
    rendezvous: float = 25,
    start: Callable[..., Cluster] = Cluster,
) -> Ended:
    """Run on `hosts` hosts, and commit the fault in the middle."""
    chance = random.Random(seed)
    with network(hosts) as made:
        cluster = start(made, write_recipe(folder, rendezvous=rendezvous), environment)
        cluster.wait_for_step(chance.randrange(4, 20))
        cluster.disturbed = time.monotonic()
        fault(cluster, chance)
        return cluster.end()


def ask_to_stop(cluster: Cluster, chance: random.Random) -> None:
    """Ask one agent or one rank for the end."""
    number = chance.randrange(len(cluster.hosts))
    pid = chance.choice([cluster.agent(number), cluster.ranks(number)[0]])
    os.kill(pid, chance.choice([signal.SIGTERM, signal.SIGUSR1]))


def lose_worker(cluster: Cluster, chance: random.Random) -> None:
    os.kill(cluster.ranks(chance.randrange(len(cluster.hosts)))[0], signal.SIGKILL)


def lose_agent(cluster: Cluster, chance: random.Random) -> None:
    """Kill an agent; its scheduler starts it again after a moment."""
    number = chance.randrange(len(cluster.hosts))
    os.kill(cluster.agent(number), signal.SIGKILL)
    time.sleep(chance.uniform(0, 3))
    cluster.again(number)


def lose_agent_of_a_scheduler(cluster: Cluster, chance: random.Random) -> None:
    """Kill an agent; a scheduler starts it again, and every other that fails, three times."""
    number = chance.randrange(len(cluster.hosts))
    os.kill(cluster.agent(number), signal.SIGKILL)
    left = dict.fromkeys(cluster.agents, 3)
    while time.monotonic() < cluster.disturbed + LIMIT:
        codes = {each: agent.poll() for each, agent in cluster.agents.items()}
        if all(code == 0 for code in codes.values()):
            return
        for each, code in codes.items():
            if code and left[each]:
                left[each] -= 1
                cluster.start(each)
        time.sleep(0.5)


def lose_follower(cluster: Cluster, chance: random.Random) -> None:
    """Kill an agent other than the first for good."""
    os.kill(cluster.agent(len(cluster.hosts) - 1), signal.SIGKILL)


def freeze(cluster: Cluster, chance: random.Random) -> None:
    """Stop all processes of a host, and let them go on after a while."""
    host = cluster.hosts[chance.randrange(len(cluster.hosts))]
    host.send(signal.SIGSTOP)
    time.sleep(chance.uniform(3, 18))
    host.send(signal.SIGCONT)


def cut_link(cluster: Cluster, chance: random.Random, seconds: float = 5) -> None:
    """Take a host's link down, and up after a while."""
    host = cluster.hosts[chance.randrange(1, len(cluster.hosts))]
    host.link("down")
    time.sleep(seconds)
    host.link("up")
    cluster.disturbed = time.monotonic()


def cut_link_for_a_minute(cluster: Cluster, chance: random.Random) -> None:
    cut_link(cluster, chance, 60)


def lose_host(cluster: Cluster, chance: random.Random) -> None:
    """Take a host other than the first away for good."""
    host = cluster.hosts[chance.randrange(1, len(cluster.hosts))]
    host.link("down")
    host.send(signal.SIGKILL)


def come_back(cluster: Cluster, chance: random.Random) -> None:
    """Lose a host with its link; it comes back when the others have noticed."""
    number = chance.randrange(1, len(cluster.hosts))
    host = cluster.hosts[number]
    host.link("down")
    host.send(signal.SIGKILL)
    lost = f"node {number} ({host.name}, {host.address}) was lost"
    assert becomes(lambda: lost in cluster.said(0).read_text(), LIMIT), cluster.said(0).read_text()
    host.link("up")
    cluster.again(number)
    cluster.disturbed = time.monotonic()  # its return is one more thing to recover from
