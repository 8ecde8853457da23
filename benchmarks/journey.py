"""Compare a training under three strategies on three world sizes with an undisturbed one.

    python benchmarks/journey.py [--runs FOLDER] [--picture FILE.svg] [--json FILE]

SmolLM2-135M trains under ZeRO-3 with offload on 2 processes until step 20 is saved and is killed
there, goes on under FSDP on 3 until step 40 and is killed again, and ends under DDP on 1, which
exports it. The other run is under DDP on 2 and undisturbed. Exits 1 when a step's loss differs by
more than 1e-4 between the two, or the export does not generate text.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import raw
from curve import Curve, picture
from smollm import generate

RECIPES = Path(__file__).parents[1] / "recipes"
STEPS, LEG = 60, 20
TOLERANCE = 1e-4
LEGS = (
    ("ZeRO-3, offloaded, 2 processes", "smollm_zero3_offload", 2),
    ("FSDP, 3 processes", "smollm_fsdp", 3),
    ("DDP, 1 process", "smollm_ddp", 1),
)
COMMON = (f"train.steps={STEPS}", "checkpoint.every=10")


@click.command()
@click.option("--runs", type=click.Path(path_type=Path), help="Keep the run folders here.")
@click.option("--picture", "svg", type=click.Path(path_type=Path), help="Draw both curves here.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here."
)
def main(runs: Path | None, svg: Path | None, json_file: Path | None) -> None:
    """Run both, compare, draw."""
    with tempfile.TemporaryDirectory() as scratch:
        root = runs or Path(scratch)
        home = stay(root / "home")
        away = travel(root / "journey")
        text = generate(root / "journey" / "export")
    worst = max(abs(a - b) for a, b in zip(home, away, strict=True))
    if svg:
        names = [name for name, _, _ in LEGS]
        svg.write_text(picture(_curves(home, away, names), "step", "loss"), "utf-8")
    if json_file:
        rows = [{"home": one, "away": other} for one, other in zip(home, away, strict=True)]
        raw.write(json_file, "journey", rows, steps=len(home), largest_difference=worst)
    click.echo(f"largest difference of a step's loss: {worst:.2e} over {len(home)} steps")
    click.echo(f"the export goes on with: {text!r}")
    if worst > TOLERANCE or len(home) != STEPS or not text.strip():
        sys.exit(1)


def stay(run_dir: Path) -> list[float]:
    """Return the losses of the undisturbed run."""
    pipe("run", str(RECIPES / "smollm_ddp.yaml"), "--run-dir", str(run_dir), *COMMON).wait()
    return losses(run_dir)


def travel(run_dir: Path) -> list[float]:
    """Return the losses of the travelling run, which is killed at the end of every leg but the
    last."""
    for number, (name, recipe, procs) in enumerate(LEGS):
        file = str(RECIPES / f"{recipe}.yaml")
        where = ["run", file, "--run-dir", str(run_dir)]
        if number:
            where = ["resume", str(run_dir), "--recipe", file]
        click.echo(name, err=True)
        process = pipe(*where, f"launch.procs={procs}", *COMMON)
        if number < len(LEGS) - 1:
            kill_after(process, run_dir / f"checkpoints/step-{LEG * (number + 1):08d}")
        elif process.wait():
            raise click.ClickException(f"{name} failed")
    return losses(run_dir)


def pipe(*arguments: str) -> subprocess.Popen[bytes]:
    """Start `pipe` in its own process group."""
    command = [sys.executable, "-m", "pipetrain", *arguments]
    return subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)


def kill_after(process: subprocess.Popen[bytes], checkpoint: Path) -> None:
    """Kill the run with SIGKILL as soon as the checkpoint is there."""
    while not checkpoint.exists():
        if process.poll() is not None:
            raise click.ClickException("the run ended before it was to be killed")
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(3)  # its ranks die with it, and the kernel releases its lock


def losses(run_dir: Path) -> list[float]:
    """Return the loss of every step, each once and in order."""
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    trained = [record for record in found if "loss" in record]
    steps = [record["step"] for record in trained]
    if steps != list(range(1, STEPS + 1)):
        raise click.ClickException(f"{run_dir}: the steps are {steps}")
    return [record["loss"] for record in trained]


def _curves(home: list[float], away: list[float], names: list[str]) -> list[Curve]:
    legs = [
        Curve(name, [(step + 1, away[step]) for step in range(LEG * place, LEG * (place + 1))])
        for place, name in enumerate(names)
    ]
    stayed = Curve("undisturbed: DDP, 2 processes", list(enumerate(home, 1)), wide=True)
    return [stayed, *legs]


if __name__ == "__main__":
    main()
