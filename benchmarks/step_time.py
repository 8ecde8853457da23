"""Compare `pipe plan`'s step time with the real one on this machine.

    python benchmarks/step_time.py [--procs 1,2] [--strategies "ddp,fsdp full,zero2"] [--steps 8]

Measures the machine with `pipe doctor`, then runs a recipe of each shape and strategy, and compares
the median step with the plan's lower bound and expectation at the measured rates. Needs a machine
that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from shapes import SHAPES

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline.doctor.report import read_machine
from pipeline.planning.hardware import HardwareOptions, Margins
from pipeline.planning.memory_plan import check, estimate_plan
from tests.support.strategies import STRATEGIES

BUCKETS = {"wrap.zero": {"reduce_bucket_size": 50_000_000}}
"""Fields of stages whose default buckets are larger than these models."""
LENGTH, MICRO = 256, 2
THREADS = 1
"""Threads of each process, while the machine is measured and while it trains."""
VOCABULARY = 49152
TEXT = "The first step of a run is slow, the others are what counts.\n" * 40_000


class Row(NamedTuple):
    """One configuration, in seconds."""

    shape: str
    wrap: str
    procs: int
    compute: str
    least: float
    expected: float
    measured: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--procs", default="1,2")
    parser.add_argument("--strategies", default="ddp,fsdp full,zero2")
    parser.add_argument("--shapes", default="small,0.5b")
    parser.add_argument("--compute", default="bf16,fp32")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    procs = [int(number) for number in given.procs.split(",")]
    wraps, shapes, computes = (
        text.split(",") for text in (given.strategies, given.shapes, given.compute)
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = list(_rows(Path(folder), procs, wraps, shapes, computes, given.steps))
    print(
        "| model | strategy | processes | compute | at least s | expected s | measured s | "
        "measured / expected |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.shape} | {row.wrap} | {row.procs} | {row.compute} | {row.least:.2f} | "
            f"{row.expected:.2f} | {row.measured:.2f} | {row.measured / row.expected:.2f} |"
        )
    ratios = [row.measured / row.expected for row in rows]
    print(
        f"\nmeasured / expected: {min(ratios):.2f} to {max(ratios):.2f}, "
        f"median {statistics.median(ratios):.2f}"
    )


def _rows(
    folder: Path, procs: Sequence[int], wraps: Sequence[str], shapes: Sequence[str],
    computes: Sequence[str], steps: int,
) -> Iterator[Row]:  # fmt: skip
    (folder / "text.txt").write_text(TEXT, "utf-8")
    for count in procs:
        machine = folder / f"machine-{count}.json"
        _pipe("doctor", "--procs", str(count), "--out", str(machine), "--folder", str(folder))
        for shape in shapes:
            for compute in computes:
                for wrap in wraps:
                    recipe = _recipe(folder, shape, wrap, count, compute, steps)
                    machines = HardwareOptions(machine=read_machine(machine))
                    memory_plan = estimate_plan(check(recipe, [], machines), machines, Margins())
                    run = folder / f"run-{shape}-{wrap}-{count}-{compute}"
                    _pipe("run", str(recipe), "--run-dir", str(run))
                    time = memory_plan.time
                    yield Row(shape, wrap, count, compute, time.least, time.expected, _median(run))


def _recipe(folder: Path, shape: str, wrap: str, procs: int, compute: str, steps: int) -> Path:
    strategy = STRATEGIES[wrap].full_size()
    recipe = {
        "name": "step_time",
        "launch": {"procs": procs, "device": "cpu", "threads": THREADS},
        "stages": {
            "model": {
                "use": "model.hf",
                "config": {**SHAPES[shape], "vocab_size": VOCABULARY},
                "tokenizer": str(_tokenizer()),
            },
            "precision": {"use": "precision.policy", "compute": compute},
            "data": {
                "use": "data.text",
                "files": str(folder / "text.txt"),
                "sequence_length": LENGTH,
            },
            "optimizer": {"use": "optimizer.adamw"},
            "wrap": {"use": strategy.use, **strategy.fields, **BUCKETS.get(strategy.use, {})},
            "checkpoint": {"use": "checkpoint.sharded"},
            "train": {
                "use": "train.causal_lm",
                "steps": steps,
                "global_batch_size": MICRO * procs,
                "micro_batch_size": MICRO,
            },
        },
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    return file


def _tokenizer() -> Path:
    folder = Path(__file__).parents[1] / "recipes" / "models" / "smollm2-135m-instruct"
    found = next(folder.glob("*.gguf"), None)
    if found is None:
        sys.exit("run recipes/fetch_smollm.py first: its tokenizer is used")
    return found


def _pipe(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipetrain", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": str(THREADS)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"pipe {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _median(run: Path) -> float:
    """Return the median time in seconds of the steps after the second."""
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return statistics.median(
        r["step_seconds"] for r in records if r.get("step", 0) > 2 and "loss" in r
    )


if __name__ == "__main__":
    main()
