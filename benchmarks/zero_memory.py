"""Compare the forecast of what DeepSpeed ZeRO holds with what torch's allocator hands out.

    python benchmarks/zero_memory.py [--only "stage 3"] [--json FILE]

Every configuration trains a small random model with the real engine for three steps on CPU ranks;
the last step is compared with `stages.wrap.zero.memory`, phase by phase, on the rank that holds
most. Exits 1 when a phase is off by more than 5 %. See docs/zero-memory.md.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click
import zero_memory_rank
from overhead import run_to_end
from tables import markdown
from zero_memory_rank import SPOKEN, Job

from stages.wrap.zero import OptimizerOffload, ParameterOffload, Zero
from stages.wrap.zero.memory import Moment, Setting, Weight, Weights, peak

LIMIT = 0.05
HOST = OptimizerOffload()
PARAMETERS = ParameterOffload()
BUCKET = {"reduce_bucket_size": 500_000}
NONE_PERSIST = {"param_persistence_threshold": 1000}
THREE = {"stage": 3, **BUCKET, **NONE_PERSIST}

SMALL = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 704,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
TIED = {**SMALL, "tie_word_embeddings": True, "vocab_size": 8000}
LARGER = {
    **SMALL, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "vocab_size": 4000,
}  # fmt: skip


class Case(NamedTuple):
    """A configuration of the table."""

    job: Job
    world: int = 2


def small(zero: dict[str, Any], **fields: Any) -> Job:
    """A job on the small model with two micro-batches."""
    return Job(**{"model": SMALL, "zero": zero, "micro_batches": 2, **fields})


CASES = {
    "stage 1": Case(small({"stage": 1})),
    "stage 1, 1 rank": Case(small({"stage": 1}), 1),
    "stage 1, reduce bf16": Case(small({"stage": 1}, reduce="bf16")),
    "stage 1, fp16": Case(small({"stage": 1, **BUCKET}, compute="fp16")),
    "stage 1, fp32": Case(small({"stage": 1, **BUCKET}, compute="fp32")),
    "stage 1, offload": Case(small({"stage": 1, **BUCKET, "offload_optimizer": HOST})),
    "stage 1, 31 M": Case(small({"stage": 1}, model=LARGER)),
    "stage 2": Case(small({"stage": 2, **BUCKET})),
    "stage 2, 1 rank": Case(small({"stage": 2, **BUCKET}), 1),
    "stage 2, 4 ranks": Case(small({"stage": 2, **BUCKET}), 4),
    "stage 2, bucket of 20 M": Case(small({"stage": 2, "reduce_bucket_size": 20_000_000})),
    "stage 2, bucket of 0.1 M": Case(small({"stage": 2, "reduce_bucket_size": 100_000})),
    "stage 2, overlap": Case(small({"stage": 2, **BUCKET, "overlap_comm": True})),
    "stage 2, not contiguous": Case(small({"stage": 2, **BUCKET, "contiguous_gradients": False})),
    "stage 2, bf16 masters": Case(small({"stage": 2, **BUCKET}, master="bf16")),
    "stage 2, fp32": Case(small({"stage": 2, **BUCKET}, compute="fp32")),
    "stage 2, tied": Case(small({"stage": 2, "reduce_bucket_size": 1_000_000}, model=TIED)),
    "stage 2, LoRA, 31 M": Case(small({"stage": 2, **BUCKET}, lora={"rank": 16}, model=LARGER)),
    "stage 2, offload": Case(small({"stage": 2, **BUCKET, "offload_optimizer": HOST})),
    "stage 2, offload, fp32": Case(
        small({"stage": 2, **BUCKET, "offload_optimizer": HOST}, compute="fp32")
    ),
    "stage 3": Case(small(THREE)),
    "stage 3, 1 rank": Case(small(THREE), 1),
    "stage 3, 4 ranks": Case(small(THREE), 4),
    "stage 3, defaults but the bucket": Case(small({"stage": 3, **BUCKET})),
    "stage 3, no prefetch or reuse": Case(
        small({**THREE, "prefetch_bucket_size": 0, "max_reuse_distance": 0})
    ),
    "stage 3, few live": Case(
        small({
            **THREE, "prefetch_bucket_size": 100_000, "max_reuse_distance": 100_000,
            "max_live_parameters": 500_000,
        })
    ),
    "stage 3, sub-groups": Case(small({**THREE, "sub_group_size": 300_000})),
    "stage 3, fp16": Case(small(THREE, compute="fp16")),
    "stage 3, fp32": Case(small(THREE, compute="fp32")),
    "stage 3, reduce bf16": Case(small(THREE, reduce="bf16")),
    "stage 3, tied": Case(small({"stage": 3, "reduce_bucket_size": 1_000_000}, model=TIED)),
    "stage 3, LoRA, 31 M": Case(small(THREE, lora={"rank": 16}, model=LARGER)),
    "stage 3, 31 M": Case(small({"stage": 3, "reduce_bucket_size": 3_000_000}, model=LARGER)),
    "stage 3, 31 M, few live": Case(
        small(
            {
                "stage": 3, "reduce_bucket_size": 3_000_000, "max_live_parameters": 10_000_000,
                "max_reuse_distance": 0, "prefetch_bucket_size": 3_000_000,
            },
            model=LARGER,
        )
    ),
    "stage 3, offload": Case(small({**THREE, "offload_optimizer": HOST})),
    "stage 3, offload both": Case(
        small({**THREE, "offload_optimizer": HOST, "offload_param": PARAMETERS})
    ),
}  # fmt: skip


class Row(NamedTuple):
    """Bytes in a phase."""

    phase: str
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1


@click.command()
@click.option("--only", default="", help="Configurations whose names begin so.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
def main(only: str, json_file: Path | None) -> None:
    """Measure every configuration, print a Markdown table."""
    found = {}
    for name, case in CASES.items():
        if name.startswith(only):
            click.echo(f"{name} ...", err=True)
            found[name] = list(compared(case.job, case.world, measure(case.job, case.world)))
    phases = list(dict.fromkeys(row.phase for rows in found.values() for row in rows))
    click.echo(markdown(["configuration", *phases], [line(n, r, phases) for n, r in found.items()]))
    if json_file:
        text = {n: [{**r._asdict(), "error": r.error} for r in rows] for n, rows in found.items()}
        json_file.write_text(json.dumps(text, indent=1) + "\n", "utf-8")
    sys.exit(any(abs(row.error) > LIMIT for rows in found.values() for row in rows))


def line(name: str, rows: Sequence[Row], phases: Sequence[str]) -> list[str]:
    """Megabytes measured and the forecast's error, a phase a cell."""
    cells = {row.phase: f"{row.measured / 1e6:.2f} ({row.error:+.1%})" for row in rows}
    return [name, *(cells.get(phase, "-") for phase in phases)]


def measure(job: Job, world: int) -> list[dict[str, Any]]:
    """What every rank held. Raises click.ClickException when one failed."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        run_to_end([
            context.Process(
                target=zero_memory_rank.main, args=(job, rank, world, folder), daemon=True
            )
            for rank in range(world)
        ])  # fmt: skip
        files = [Path(folder, f"rank-{rank}.json") for rank in range(world)]
        if not all(file.exists() for file in files):
            said = (f.read_text("utf-8")[-3000:] for f in Path(folder).glob(f"{SPOKEN}*"))
            raise click.ClickException("\n".join([f"a rank failed: {asdict(job)}", *said]))
        return [json.loads(file.read_text("utf-8")) for file in files]


def compared(job: Job, world: int, ranks: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Every phase of the last step, on the rank that held most."""
    setting, model = described(job, world, ranks[0])

    def row(name: str, mark: str, moment: Moment, again: bool = False, kind: str = "peak") -> Row:
        measured = max(rank["phases"][mark][kind] for rank in ranks)
        return Row(name, measured, peak(setting, model, moment, accumulating=again))

    last = job.steps - 1
    if setting.stage.offload_optimizer is None:  # else device and host are not full at once
        yield row("load", "load", "load")
    yield row("forward", f"{last}/0/forward", "forward")
    yield row("backward", f"{last}/0/backward", "backward")
    if job.micro_batches > 1:
        yield row("forward 2", f"{last}/1/forward", "forward", again=True)
        yield row("backward 2", f"{last}/1/backward", "backward", again=True)
    yield row("step", f"{last}/step", "step")
    yield row("between", f"{last}/step", "between", kind="end")


def described(job: Job, world: int, rank: dict[str, Any]) -> tuple[Setting, Weights]:
    """What the forecast is told of a run."""
    stage = Zero(**job.zero)
    moments = 4 if job.master == "fp32" or stage.offload_optimizer is not None else 2
    setting = Setting(
        stage=stage, world=world, compute=job.compute, master=job.master, reduce=job.reduce,
        moment_bytes=2 * moments, groups=rank["groups"],
    )  # type: ignore[arg-type]  # fmt: skip
    blocks: dict[int, list[Weight]] = {}
    root = []
    for name, elements, trained in rank["parameters"]:
        number = re.search(r"\.layers\.(\d+)\.", name)
        where = blocks.setdefault(int(number[1]), []) if number else root
        where.append(Weight(elements, trained))
    tied = bool(job.model["tie_word_embeddings"])
    return setting, Weights(tuple(map(tuple, blocks.values())), tuple(root), tied)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
