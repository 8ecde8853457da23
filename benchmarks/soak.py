"""An hour of random faults: small runs on one machine and on several hosts, one after another.

python benchmarks/soak.py [--minutes 60] [--seed 0] [--out soak.jsonl]

Each trial runs a tiny recipe under a random strategy, commits a random fault at a random moment,
and starts the same command again as a scheduler would, until it has finished. It passes if the
weights are those of an undisturbed run bit for bit, every step is in `metrics.jsonl` once, in
order, and nothing is left running. Hosts are network namespaces, where this process may make them.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.conftest import install_plugin
from tests.support import network, trials
from tests.support.tiny_recipe import EXPORT, losses, training

STEPS = 40
STRATEGIES = {
    "ddp": {"use": "wrap.ddp"},
    "fsdp": {"use": "wrap.fsdp"},
    "zero1": {"use": "wrap.zero", "stage": 1},
    "zero3": {"use": "wrap.zero", "stage": 3},
}
LIMIT = 120.0
"""Seconds in which a start of the command ends, one way or another."""
Fault = Callable[["Run", random.Random], None]


class Run:
    """A run on this machine that the same command continues."""

    def __init__(self, folder: Path, strategy: str, environment: dict[str, str]) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.environment = environment
        stages = training(checkpoint={"every": 5, "keep": 2}, train={"steps": STEPS}) | EXPORT
        stages["wrap"] = STRATEGIES[strategy]
        launch = {"procs": 2, "device": "cpu", "restarts": {"backoff": 0.5}}
        recipe = {"name": "soak", "launch": launch, "stages": stages}
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        self.starts = 0

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command."""
        self.starts += 1
        command = ["run", str(self.folder / "recipe.yaml"), "--run-dir", str(self.run_dir)]
        with (self.folder / "said").open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipetrain", *command],
                env=self.environment, stdout=said, stderr=said,
            )  # fmt: skip
        return self.process

    def ranks(self) -> list[int]:
        """Return the processes of its ranks."""
        return [
            int(place.name)
            for place in Path("/proc").glob("[0-9]*")
            if re.search(rf"execution.worker \d+ {self.run_dir} $", trials.line(int(place.name)))
        ]

    def weights(self) -> bytes:
        """Return the exported model."""
        return (self.run_dir / "export" / "model.safetensors").read_bytes()


def kill_rank(run: Run, chance: random.Random) -> None:
    """Kill a rank."""
    _send(run, chance, signal.SIGKILL)


def stop_rank(run: Run, chance: random.Random) -> None:
    """Have one rank asked to stop."""
    _send(run, chance, chance.choice([signal.SIGTERM, signal.SIGUSR1]))


def freeze_rank(run: Run, chance: random.Random) -> None:
    """Stop a rank's process for good."""
    _send(run, chance, signal.SIGSTOP)


def stop_launcher(run: Run, chance: random.Random) -> None:
    """Ask for the end."""
    run.process.send_signal(chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]))


def kill_launcher(run: Run, chance: random.Random) -> None:
    """Kill the launcher."""
    run.process.kill()


def _send(run: Run, chance: random.Random, number: signal.Signals) -> None:
    ranks = run.ranks()
    if ranks:
        os.kill(chance.choice(ranks), number)


HERE: tuple[Fault, ...] = (kill_rank, stop_rank, freeze_rank, stop_launcher, kill_launcher)
BETWEEN = (trials.lose_worker, trials.lose_agent, trials.freeze, trials.cut_link)


def on_this_machine(
    folder: Path, chance: random.Random, environment: dict[str, str], calm: dict[str, bytes]
) -> dict[str, object]:
    """Return what became of a run with a fault or two."""
    strategy, faults = (
        chance.choice(list(STRATEGIES)),
        chance.choices(HERE, k=chance.choice([1, 2])),
    )
    if strategy not in calm:
        undisturbed = Run(_made(folder, f"calm-{strategy}"), strategy, environment)
        assert undisturbed.start().wait(LIMIT) == 0
        calm[strategy] = undisturbed.weights()
    run = Run(_made(folder, f"run-{chance.random()}"), strategy, environment)
    run.environment = environment | {"READ_SECONDS": "0.03"}
    for fault in faults:
        process = run.start()
        target, deadline = len(losses(run.run_dir)) + chance.randrange(12), time.monotonic() + 30
        while process.poll() is None and len(losses(run.run_dir)) < target:
            time.sleep(0.05)
            assert time.monotonic() < deadline, "no step in half a minute"
        time.sleep(chance.uniform(0, 0.5))
        fault(run, chance)
        if process.wait(LIMIT) == 0:
            break
    while process.returncode != 0:
        process = run.start()
        process.wait(LIMIT)
        assert run.starts < 6, "it does not finish"
    steps = [step for step, _ in losses(run.run_dir)]
    good = run.weights() == calm[strategy] and steps == list(range(1, STEPS + 1))
    return {
        "where": f"one machine, {strategy}",
        "faults": [fault.__name__ for fault in faults],
        "good": good and not run.ranks(),
        "starts": run.starts,
    }


def between_hosts(
    folder: Path, chance: random.Random, environment: dict[str, str], calm: dict[str, bytes]
) -> dict[str, object]:
    """Return what became of a run on hosts with a fault."""
    hosts, fault = chance.choice([2, 3]), chance.choice(BETWEEN)
    place = _made(folder, f"hosts-{chance.random()}")
    ended = trials.trial(place, fault, chance.randrange(1 << 30), environment, hosts=hosts)
    key = f"hosts {hosts}"
    if key not in calm:
        calm[key] = _calm_hosts(_made(folder, f"calm-{hosts}"), hosts, environment)
    good = ended.codes == [0] * hosts and ended.weights == calm[key] and ended.left == 0
    good = good and ended.steps == list(range(1, trials.STEPS + 1))
    return {"where": f"{hosts} hosts", "faults": [fault.__name__], "good": good,
            "seconds_after_fault": round(ended.seconds, 1)}  # fmt: skip


def _calm_hosts(folder: Path, hosts: int, environment: dict[str, str]) -> bytes:
    recipe = trials.write_recipe(folder, procs=hosts)
    command = [sys.executable, "-m", "pipetrain", "run", str(recipe), "--run-dir", f"{folder}/run"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return (folder / "run" / "export" / "model.safetensors").read_bytes()


def _made(folder: Path, name: str) -> Path:
    place = folder / name
    place.mkdir()
    return place


def main() -> int:
    """Run trials until the time is over; print each, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chance, calm, found = random.Random(options.seed), {}, []
    reason = network.why_not()
    kinds = [on_this_machine] if reason else [on_this_machine, between_hosts]
    print(f"hosts: {reason or 'network namespaces'}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plugin = install_plugin(_made(folder, "plugin"))
        path = os.pathsep.join([str(plugin), str(Path(__file__).parents[1])])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                record = chance.choice(kinds)(folder, chance, environment, calm)
            except (AssertionError, subprocess.SubprocessError) as error:
                record = {"where": "?", "faults": [], "good": False, "problem": str(error)[:500]}
            record["seconds"] = round(time.monotonic() - began, 1)
            found.append(record)
            print(json.dumps(record), flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps(record) + "\n")
    counts = collections.Counter(name for one in found for name in one["faults"])
    good = sum(bool(one["good"]) for one in found)
    print(f"{good} of {len(found)} trials good; faults: {dict(sorted(counts.items()))}")
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
