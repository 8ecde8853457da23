"""Time `pipe plan` for models of 70B, without and with a cached profile.

    python benchmarks/plan_time.py [--rounds 5] [--recipe FILE ...]

Every plan runs in its own process. A process that only imports torch and the model's class of
transformers is timed too: the rest of a plan's time is its own work. Rounds take turns. Needs no
GPU.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import click
from tables import markdown

RECIPES = Path(__file__).parents[1] / "recipes"
SHIPPED = ("llama70b_fsdp", "llama70b_lora_fsdp", "llama70b_zero3")
IMPORTS = "import torch, torch.distributed.fsdp; from transformers import LlamaForCausalLM"
MACHINES = ("--gpus", "8", "--nodes", "8", "--gpu", "H100", "--interconnect", "8x400g")


@click.command()
@click.option("--rounds", default=5, help="How often each is timed.")
@click.option("--recipe", "given", multiple=True, type=click.Path(exists=True, path_type=Path))
def main(rounds: int, given: tuple[Path, ...]) -> None:
    """Measure, and print a Markdown table of all rounds."""
    recipes = given or [RECIPES / f"{name}.yaml" for name in SHIPPED]
    imports: list[float] = []
    cold: Mapping[Path, list[float]] = {recipe: [] for recipe in recipes}
    kept: Mapping[Path, list[float]] = {recipe: [] for recipe in recipes}
    for _ in range(rounds):
        imports.append(_seconds(sys.executable, "-c", IMPORTS))
        for recipe in recipes:
            with tempfile.TemporaryDirectory() as profiles:
                plan = (sys.executable, "-m", "pipetrain", "plan", str(recipe), *MACHINES)
                for found in (cold, kept):
                    found[recipe].append(_seconds(*plan, PIPE_PROFILES=profiles))
    head = ["", "imports", "cold", "beyond imports", "kept"]
    rows = []
    for recipe in recipes:
        own = [whole - base for whole, base in zip(cold[recipe], imports, strict=True)]
        rows.append([recipe.stem, *map(_shown, (imports, cold[recipe], own, kept[recipe]))])
    click.echo(markdown(head, rows))


def _seconds(*command: str, **environment: str) -> float:
    """Return the wall-clock seconds of a process. Exit code 3, a plan that does not fit, counts as
    a plan."""
    began = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 3):
        raise click.ClickException(done.stderr[-2000:])
    return time.perf_counter() - began


def _shown(seconds: list[float]) -> str:
    """Return the median and all values."""
    rounds = " ".join(f"{one:.2f}" for one in seconds)
    return f"{statistics.median(seconds):.2f} s ({rounds})"


if __name__ == "__main__":
    main()
