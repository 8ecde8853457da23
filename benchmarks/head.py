"""Measure the memory of a model's head and its loss in training, beside other implementations.

    python benchmarks/head.py [--vocabulary 128256] [--tokens 4096] [--width 1024] [--chunk 128]

Forward and backward of a linear head with cross-entropy on random hidden states, on the CPU: with
all logits at once, as `loss_chunk_size` computes it, and as torch's `linear_cross_entropy` does.
Each call runs in its own process. Measured are seconds and the peak growth of memory, less the
gradients of weight and hidden states, which remain in every case. Exits 1 when losses or gradients
differ by more than rounding.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from apart.crew import Part, measure
from tables import markdown, mib

FULL = "all logits at once"
WAYS = {
    FULL: "heads.losses:full",
    "ours (loss_chunk_size)": "heads.losses:ours",
    "torch linear_cross_entropy": "heads.losses:torch_own",
}
BYTES = {"float32": 4, "bfloat16": 2}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest accepted difference of gradients, relative to the largest compared one."""


@click.command()
@click.option("--vocabulary", default=128256, help="Rows of the head.")
@click.option("--tokens", default=4096, help="Tokens of a micro-batch.")
@click.option("--width", default=1024, help="Width of the hidden states.")
@click.option("--chunk", default=128, help="Our loss_chunk_size.")
@click.option("--dtype", default="float32", type=click.Choice(list(BYTES)))
@click.option("--threads", default=2, help="Threads of each process.")
def main(**job: Any) -> None:
    """Compare memory, time and gradients."""
    parts = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, task in WAYS.items():
            click.echo(f"{name} ...", err=True)
            (parts[name],) = measure(task, job, scratch=Path(scratch))
    own = BYTES[job["dtype"]] * job["width"] * (job["vocabulary"] + job["tokens"])
    click.echo(table(parts, own))
    wrong = [name for name, part in parts.items() if not agrees(part, parts[FULL], job["dtype"])]
    for name in wrong:
        click.echo(f"{name}: another loss or other gradients", err=True)
    sys.exit(bool(wrong))


def table(parts: Mapping[str, Part], gradients: int) -> str:
    """Return a table with a row for each implementation; `gradients` are the bytes that remain in
    every case."""
    most = parts[FULL].grown.rss - gradients
    rows = [
        [
            name,
            mib(part.grown.rss - gradients),
            f"1/{most / max(part.grown.rss - gradients, 1):.1f}",
            f"{part.seconds:.2f}",
            f"{part.found['loss']:.6g}",
        ]
        for name, part in parts.items()
    ]
    return markdown(["", "MiB beyond the gradients", "of all at once", "seconds", "loss"], rows)


def agrees(part: Part, other: Part, dtype: str) -> bool:
    """Return whether losses and gradients are the same but for rounding."""
    limit = TOLERANCE[dtype]
    if abs(part.found["loss"] - other.found["loss"]) > limit * abs(other.found["loss"]):
        return False
    for one, two in zip(part.found["gradients"], other.found["gradients"], strict=True):
        scale = max(abs(value) for value in two["some"])
        differences = (abs(a - b) for a, b in zip(one["some"], two["some"], strict=True))
        if max(differences) > limit * scale or abs(one["norm"] / two["norm"] - 1) > limit:
            return False
    return True


if __name__ == "__main__":
    main()
