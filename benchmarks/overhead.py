"""Measure the overhead of `pipe run`'s training loop over a bare loop of the same work.

    python benchmarks/overhead.py [--strategies ddp,zero3] [--procs 1,2] [--compute bf16,fp32]
                                  [--rounds N] [--steps N] [--json FILE]

Both loops run in the same processes and take turns, a block of steps each, between calibrations;
see docs/dev/results.md. Exits 1 when the overhead is certainly more than 3 %, or when the two
loops' losses show that they did different work.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import raw
from overhead_job import MODEL, STRATEGIES, Job
from overhead_stats import LIMIT, Comparison, as_row, compare

from pipeline.hardware.gpus import gpu_count

SAME_LOSS = 0.02
"""Relative difference of the two loops' losses that rounding explains: autocast keeps other
operators in bf16."""


def listed(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    """Split a comma-separated option."""
    return value.split(",")


@click.command()
@click.option("--strategies", default=",".join(STRATEGIES), show_default=True, callback=listed)
@click.option("--procs", default="1,2", show_default=True, callback=listed)
@click.option("--compute", default="bf16", show_default=True, callback=listed)
@click.option("--rounds", default=20, show_default=True, help="Pairs of blocks.")
@click.option("--steps", default=10, show_default=True, help="Steps of a block, reported once.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: a GPU if any.")
@click.option("--model", type=click.Path(path_type=Path), help="Another config.json.")
@click.option("--length", default=256, show_default=True, help="Tokens of a sample.")
@click.option("--micro-batch", default=4, show_default=True, help="Samples of a step on a rank.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
def main(
    strategies: list[str], procs: list[str], compute: list[str], json_file: Path | None, **rest: Any
) -> None:
    """Measure every combination, print a Markdown table and a verdict for each."""
    rows = []
    show_head()
    with tempfile.TemporaryDirectory() as scratch:
        for job in jobs(Path(scratch), strategies, procs, compute, rest):
            result = run(job)
            comparison = compare(result["rounds"], job.block_tokens)
            show(job.label, comparison)
            rows.append({**as_row(job.label, comparison), **result})
    if json_file:
        raw.write(json_file, "overhead", rows)
    if not conclude(rows):
        sys.exit(1)


def jobs(
    scratch: Path, strategies: list[str], procs: list[str], compute: list[str], rest: dict[str, Any]
) -> Iterator[Job]:
    """Yield every combination, each with its own folder and tokens."""
    from overhead_data import write_tokens

    device = rest.pop("device") or ("cuda" if gpu_count() else "cpu")
    path = rest.pop("model")
    model = json.loads(path.read_text("utf-8")) if path else MODEL
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise click.UsageError(f"no strategy {strategy}; there are {', '.join(STRATEGIES)}")
        for count in procs:
            for dtype in compute:
                folder = scratch / f"{strategy}-{count}-{dtype}"
                folder.mkdir()
                write_tokens(folder, vocab=model["vocab_size"], length=rest["length"])
                yield Job(
                    strategy=strategy, procs=int(count), compute=dtype, device=device,
                    model=str(path) if path else MODEL, folder=folder, **rest,
                )  # fmt: skip


def run(job: Job) -> dict[str, Any]:
    """Run both loops in `job.procs` processes; return rank 0's result. Raises click.ClickException
    with its log when a process fails."""
    import overhead_rank

    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=overhead_rank.main, args=(job, rank), daemon=True)
        for rank in range(job.procs)
    ]
    run_to_end(processes)
    path = job.folder / overhead_rank.RESULT
    if any(process.exitcode for process in processes) or not path.exists():
        raise click.ClickException(f"{job.label} failed:\n{spoken(job)}")
    result: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return result


def spoken(job: Job) -> str:
    """Return the end of every process's output."""
    import overhead_rank

    files = sorted(job.folder.glob(f"{overhead_rank.SPOKEN}*"))
    return "\n".join(f"{file.name}:\n{file.read_text('utf-8')[-3000:]}" for file in files)


def run_to_end(processes: list[Any]) -> None:
    """Start all commands and wait until they have ended or one has failed; none keeps running."""
    try:
        for process in processes:
            process.start()
        alive = list(processes)
        while alive and not any(process.exitcode for process in processes):
            multiprocessing.connection.wait([p.sentinel for p in alive])
            alive = [process for process in alive if process.is_alive()]
    finally:
        for process in filter(lambda started: started.pid, processes):
            process.kill()
            process.join()


def show_head() -> None:
    """Print the table's head."""
    click.echo(
        "| configuration | kept pairs | ours tok/s | bare tok/s | ours/bare seconds [95 %] "
        "| CPU seconds | losses differ by | 3 %? |\n|---|---|---|---|---|---|---|---|"
    )


def show(label: str, comparison: Comparison) -> None:
    """Print one line of the table."""
    c = comparison
    click.echo(
        f"| {label} | {c.kept}/{c.pairs} | {c.ours:.0f} | {c.bare:.0f} "
        f"| {c.ratio:.3f} [{c.low:.3f}, {c.high:.3f}] | {c.cpu_ratio:.3f} "
        f"| {c.loss_difference:.1e} | {c.verdict} |"
    )


def conclude(rows: list[dict[str, Any]]) -> bool:
    """Print the conclusion; return False if something is certainly wrong."""
    over = [row["configuration"] for row in rows if row["verdict"] == "over"]
    other = [row["configuration"] for row in rows if not row["loss_difference"] <= SAME_LOSS]
    open_ = [row["configuration"] for row in rows if row["verdict"] == "undecided"]
    percent = f"{LIMIT - 1:.0%}"
    if over:
        click.echo(f"\nmore than {percent} over bare: {', '.join(over)}")
    if open_:
        click.echo(f"\nundecided (more --rounds, or a quieter machine): {', '.join(open_)}")
    if other:
        click.echo(f"\nnot the same work, losses differ: {', '.join(other)}")
    if not (over or open_ or other):
        click.echo(f"\nthe training loop costs at most {percent} over bare everywhere")
    return not (over or other)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
