"""Run the smollm recipes and compare them: losses, wall time, generated text.

    python benchmarks/smollm.py [--steps N] [--only ddp,zero3] [--runs FOLDER] [--json FILE]

Recipes run one after the other, as a user would run them; each checkpoint is exported a second time
in fp32. Exits 1 when a loss differs from that of the first recipe by more than 1e-3, or an export
is damaged or generates no text.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import raw

RECIPES = Path(__file__).parents[1] / "recipes"
STRATEGIES = sorted(
    path.stem.removeprefix("smollm_")
    for path in RECIPES.glob("smollm_*.yaml")
    if "lora" not in path.stem
)
TOLERANCE = 1e-3
PROMPT = "She looked out of the window"


@click.command()
@click.option("--steps", type=int, help="Instead of the recipes' own number.")
@click.option("--only", default=",".join(STRATEGIES), show_default=True)
@click.option("--runs", type=click.Path(path_type=Path), help="Keep the run folders here.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here."
)
def main(steps: int | None, only: str, runs: Path | None, json_file: Path | None) -> None:
    """Run, compare, print a Markdown table."""
    with tempfile.TemporaryDirectory() as scratch:
        root = runs or Path(scratch)
        rows = [measure(name, root / f"smollm_{name}", steps) for name in only.split(",")]
    for row in rows:
        row |= differences(row, rows[0])
    if json_file:
        raw.write(json_file, "smollm", rows)
    show(rows)
    worst = max(row["loss_difference"] for row in rows)
    click.echo(f"\nlargest difference of a step's loss from {rows[0]['name']}: {worst:.2e}")
    if worst > TOLERANCE or not all(
        row["text"].strip() and row["text_fp32"].strip() for row in rows
    ):
        sys.exit(1)


def measure(name: str, run_dir: Path, steps: int | None) -> dict[str, Any]:
    """Run one recipe; return its results and its duration in seconds."""
    command = [sys.executable, "-m", "pipetrain", "run", str(RECIPES / f"smollm_{name}.yaml")]
    command += ["--run-dir", str(run_dir), *([f"train.steps={steps}"] if steps else [])]
    click.echo(f"smollm_{name} ...", err=True)
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr)
    seconds = time.perf_counter() - began
    wide = run_dir / "export-fp32"
    pipe("export", str(run_dir), "--dtype", "fp32", "--out", str(wide))
    for folder in (run_dir / "export", wide):
        pipe("verify", str(folder))
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    trained = [record for record in records if "loss" in record]
    return {
        "name": name,
        "seconds": seconds,
        "losses": [record["loss"] for record in trained],
        "norms": [record["grad_norm"] for record in trained],
        "eval_loss": next(r["eval_loss"] for r in reversed(records) if "eval_loss" in r),
        "step_seconds": _median_step(trained),
        "engine": json.loads((run_dir / "engine.json").read_text("utf-8")),
        "text": generate(run_dir / "export"),
        "text_fp32": generate(wide),
    }


def differences(row: dict[str, Any], first: dict[str, Any]) -> dict[str, float]:
    """Return the first and the last loss, and the largest differences of a step's loss and of its
    gradient norm (relative) from the first recipe's."""
    losses = zip(row["losses"], first["losses"], strict=True)
    norms = zip(row["norms"], first["norms"], strict=True)
    return {
        "first_loss": row["losses"][0],
        "last_loss": row["losses"][-1],
        "loss_difference": max(abs(one - other) for one, other in losses),
        "norm_difference": max(abs(one / other - 1) for one, other in norms),
    }


def pipe(*arguments: str) -> None:
    """Run a command that has to succeed."""
    subprocess.run([sys.executable, "-m", "pipetrain", *arguments], check=True, stdout=sys.stderr)


def _median_step(trained: list[dict[str, Any]]) -> float:
    times = [record["time"] for record in trained]
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    return gaps[len(gaps) // 2] if gaps else float("nan")


def generate(folder: Path) -> str:
    """Return the exported model's greedy continuation of a fixed prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**tokens, max_new_tokens=16, do_sample=False)
    return str(
        tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    )


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    click.echo(
        "| recipe | first loss | last loss | eval loss | s/step | whole run, s | continues with |"
    )
    click.echo("|---|---|---|---|---|---|---|")
    for row in rows:
        losses = f"{row['losses'][0]:.5f} | {row['losses'][-1]:.5f} | {row['eval_loss']:.5f}"
        times = f"{row['step_seconds']:.2f} | {row['seconds']:.0f}"
        text = " ".join(row["text"].split()).replace("|", "/")
        click.echo(f"| smollm_{row['name']} | {losses} | {times} | {text} |")


if __name__ == "__main__":
    main()
