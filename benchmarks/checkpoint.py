"""Measure saving and loading of checkpoints side by side with torch's and DeepSpeed's own.

    python benchmarks/checkpoint.py [--wraps "fsdp full,ddp"] [--procs 2] [--other 3] [--saves 5]

Measured for each wrap, in the same processes: how long a save stalls the training loop, against the
fastest plain copy of the same bytes into warm memory; how much longer the step behind it takes, as
the writers need processors too; how long until the checkpoint is on disk; the bytes that each rank
reads to resume on the same and on another number of processes, and the memory for it. The same is
measured with torch.distributed.checkpoint (torch wraps) or DeepSpeed's save_checkpoint (ZeRO).
Exits 1 when a stall is longer than 1.1 copies, the step behind a save longer than 1.3 others, or a
rank reads more than 1.05 times its own bytes.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_rank
import click
import raw

STALL_LIMIT, STEP_LIMIT, READ_LIMIT = 1.1, 1.3, 1.05


@click.command()
@click.option("--wraps", default="fsdp full,ddp,zero3", show_default=True)
@click.option("--procs", default=2, show_default=True)
@click.option("--other", default=3, show_default=True, help="Processes that load it, too.")
@click.option("--saves", default=9, show_default=True)
@click.option("--tokens", default=256, show_default=True, help="Tokens a rank in a step.")
@click.option("--width", default=768, show_default=True, help="Hidden size of the model.")
@click.option("--folder", type=click.Path(path_type=Path), help="Disk to measure; default: /tmp.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
def main(
    wraps: str, procs: int, other: int, saves: int, tokens: int, width: int,
    folder: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Measure every wrap, print the results, and judge them."""
    found = {}
    for wrap in wraps.split(","):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            job = {"wrap": wrap, "folder": scratch, "saves": saves, "tokens": tokens}
            job["width"] = width
            result = ranks(checkpoint_rank.save_and_load, procs, job)
            elsewhere = ranks(checkpoint_rank.load_only, other, job)
            found[wrap] = {"here": result, "elsewhere": elsewhere}
            show(wrap, procs, other, result, elsewhere)
    if json_file:
        rows = [figures(wrap, one["here"], one["elsewhere"]) for wrap, one in found.items()]
        raw.write(json_file, "checkpoint", rows)
    if not all(within(wrap) for wrap in found.values()):
        sys.exit(1)


def ranks(function: Any, count: int, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the function on `count` ranks; return its results in rank order."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=checkpoint_rank.main, args=(function.__name__, rank, count, job))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    files = [checkpoint_rank.result_file(job, function.__name__, rank) for rank in range(count)]
    if any(process.exitcode for process in processes):
        raise click.ClickException("a process failed; see above")
    return [json.loads(file.read_text("utf-8")) for file in files]


def slowest(results: list[dict[str, Any]], read: Callable[[dict[str, Any]], float]) -> list[float]:
    """Return what `read` finds in each round, of the rank with most."""
    rounds = zip(*(result["rounds"] for result in results), strict=True)
    return [max(read(one) for one in ranks_of_it) for ranks_of_it in rounds]


def fastest_copies(results: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of each round's fastest way to copy, by its slowest rank."""
    ways = results[0]["rounds"][0]["copies"]
    each = [slowest(results, lambda one, way=way: one["copies"][way]) for way in ways]
    return [min(times) for times in zip(*each, strict=True)]


def stall_ratios(results: list[dict[str, Any]]) -> list[float]:
    """Return each save's stall over the time of the fastest copy before it."""
    stalls = slowest(results, lambda one: one["stall"])
    return [a / b for a, b in zip(stalls, fastest_copies(results), strict=True)]


def step_ratios(results: list[dict[str, Any]]) -> list[float]:
    """Return the time of the step behind each save over that of the two before it, on average."""
    behind = slowest(results, lambda one: one["behind"])
    alone = slowest(results, lambda one: statistics.fmean(one["alone"]))
    return [a / b for a, b in zip(behind, alone, strict=True)]


def read_ratio(results: list[dict[str, Any]]) -> float:
    """Return the bytes that the worst rank reads over the bytes that it holds."""
    return max(result["read"] / result["own"] for result in results)


def within(found: dict[str, list[dict[str, Any]]]) -> bool:
    """Return whether all limits are kept: the first stall's, and those of medians."""
    stalls, steps = stall_ratios(found["here"]), step_ratios(found["here"])
    read = max(read_ratio(found["here"]), read_ratio(found["elsewhere"]))
    stands = max(stalls[0], statistics.median(stalls)) <= STALL_LIMIT
    return stands and statistics.median(steps) <= STEP_LIMIT and read <= READ_LIMIT


def figures(wrap: str, here: list[dict[str, Any]], there: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the JSON file: what the page shows, then everything. Memory in bytes."""
    stalls, steps = stall_ratios(here), step_ratios(here)
    costs = [cost["seconds"] for one in here[0]["rounds"] for cost in one["cost"]]
    rival = [result["rival_read"] / result["own"] for result in here]
    return {
        "wrap": wrap, "bytes": sum(result["written"] for result in here),
        "first_stall_seconds": slowest(here, lambda one: one["stall"])[0],
        "first_stall": stalls[0], "later_stall": statistics.median(stalls[1:]),
        "worst_stall": max(stalls[1:]), "step": statistics.median(steps), "worst_step": max(steps),
        "on_disk_seconds": statistics.median(costs),
        "memory": max(result["beyond"] for result in here),
        "read": max(read_ratio(here), read_ratio(there)),
        "load_memory": max(result["load_memory"] for result in [*here, *there]),
        "rival": here[0]["rival"], "rival_seconds": here[0]["rival_times"],
        "rival_read": max(rival),
        "rival_load_memory": max(result.get("rival_load_memory", 0) for result in [*here, *there]),
        "here": here, "elsewhere": there,
    }  # fmt: skip


def show(
    wrap: str, procs: int, other: int, here: list[dict[str, Any]], there: list[dict[str, Any]]
) -> None:
    """Print a block of lines for one wrap."""
    ratios, steps = stall_ratios(here), step_ratios(here)
    total = sum(result["written"] for result in here)
    print(f"{wrap}: {total / 1e6:.0f} MB of state, {procs} processes")
    for way in here[0]["rounds"][0]["copies"]:
        copy = statistics.median(slowest(here, lambda one, way=way: one["copies"][way]))
        print(f"  copy of a rank's part, {way:<17}{copy * 1e3:8.1f} ms")
    stall = slowest(here, lambda one: one["stall"])[0]
    print(f"  stall, first save                       {stall * 1e3:8.1f} ms  x{ratios[0]:.2f}")
    middle, worst = statistics.median(ratios[1:]), max(ratios[1:])
    print(f"  stall, later saves, median and worst    x{middle:.2f}  x{worst:.2f}")
    crowded = max(result["crowded"] for result in here)
    print(f"  stall, of a save right behind another   {crowded:8.2f} s")
    alone = statistics.median(slowest(here, lambda one: statistics.fmean(one["alone"])))
    print(f"  a step without a save                   {alone:8.2f} s")
    print(f"  a step behind one, first, median, worst x{steps[0]:.2f}  "
          f"x{statistics.median(steps):.2f}  x{max(steps):.2f}")  # fmt: skip
    costs = [cost for one in here[0]["rounds"] for cost in one["cost"]]
    seconds, user, system = (
        statistics.median(cost[name] for cost in costs)
        for name in ("seconds", "user_seconds", "system_seconds")
    )
    rate = total / seconds / 1e9
    print(f"  on disk after                           {seconds:8.2f} s   {rate:.2f} GB/s")
    print(f"  processor time of all writers           {user:8.2f} s, the system's {system:.2f} s")
    beyond = max(result["beyond"] for result in here)
    print(f"  memory beyond the snapshot              {beyond / 1e6:8.1f} MB a rank")
    print(f"  {here[0]['rival']}:")
    for key, value in here[0]["rival_times"].items():
        print(f"    {key:<38}{value:8.2f} s   {total / value / 1e9:.2f} GB/s")
    print(f"  read per rank on {procs}, of its own bytes      x{read_ratio(here):.3f}")
    print(f"  read per rank on {other}, of its own bytes      x{read_ratio(there):.3f}")
    rival = max(result["rival_read"] / result["own"] for result in here)
    print(f"  {here[0]['rival']} reads per rank on {procs}      x{rival:.3f}")
    if "rival_read" in there[0]:
        rival = max(result["rival_read"] / result["own"] for result in there)
        print(f"  {here[0]['rival']} reads per rank on {other}      x{rival:.3f}")
    own, rival = (
        max(result.get(key, 0) / 1e6 for result in [*here, *there])
        for key in ("load_memory", "rival_load_memory")
    )
    print(f"  memory of a load                        {own:8.1f} MB a rank")
    print(f"  {here[0]['rival']}'s                    {rival:8.1f} MB a rank")


if __name__ == "__main__":
    main()
