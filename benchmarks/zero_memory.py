"""Compare `pipe plan`'s memory of DeepSpeed ZeRO with the bytes that torch's allocator hands out.

    python benchmarks/zero_memory.py [--only "stage 3"] [--json FILE]

Every configuration trains a small random model with the real engine for three steps on CPU ranks;
the last step is compared, phase by phase, on the rank that holds most, with the forecast from the
model's profile and the strategy's share. Exits 1 when a phase is off by more than 5 %. See
docs/zero-memory.md.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml
import zero_memory_rank
from overhead import run_to_end
from tables import markdown
from zero_memory_rank import SPOKEN, TOKENS, Job

from pipeline.chain.plan import Plan, plan_file
from pipeline.planning.estimate import ask_planners, step_peaks
from pipeline.planning.forecast import BACKWARD, FORWARD, LOAD, SAVE, UPDATE, StrategyMemory
from pipeline.planning.planner import Job as Planned
from pipeline.planning.topology import Topology
from pipeline.planning.trace.profiling import profile
from stages.wrap.zero import OptimizerOffload, ParameterOffload, Zero

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
    """A row of the table."""

    job: Job
    world: int = 2


def small(zero: dict[str, Any], **fields: Any) -> Job:
    """Return a job on the small model with two micro-batches."""
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
    """Bytes measured and forecast in a phase."""

    phase: str
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        """Return the error relative to the measurement."""
        return self.predicted / self.measured - 1


@click.command()
@click.option("--only", default="", help="Configurations whose names begin so.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
def main(only: str, json_file: Path | None) -> None:
    """Measure every configuration, print a Markdown table."""
    found = every_configuration(only)
    click.echo(table(found))
    if json_file:
        text = {n: [{**r._asdict(), "error": r.error} for r in rows] for n, rows in found.items()}
        json_file.write_text(json.dumps(text, indent=1) + "\n", "utf-8")
    sys.exit(any(abs(row.error) > LIMIT for rows in found.values() for row in rows))


def every_configuration(only: str = "") -> dict[str, list[Row]]:
    """Return measured and forecast phases of all configurations whose names begin with `only`."""
    found = {}
    for name, case in CASES.items():
        if name.startswith(only):
            click.echo(f"{name} ...", err=True)
            found[name] = list(compared(case.job, case.world, measure(case.job, case.world)))
    return found


def table(found: Mapping[str, Sequence[Row]]) -> str:
    """Return every configuration's phases as Markdown."""
    phases = list(dict.fromkeys(row.phase for rows in found.values() for row in rows))
    return markdown(
        ["configuration", *phases], [line(name, rows, phases) for name, rows in found.items()]
    )


def line(name: str, rows: Sequence[Row], phases: Sequence[str]) -> list[str]:
    """Return a row: in each phase the measured megabytes and the forecast's error."""
    cells = {row.phase: f"{row.measured / 1e6:.2f} ({row.error:+.1%})" for row in rows}
    return [name, *(cells.get(phase, "-") for phase in phases)]


def measure(job: Job, world: int) -> list[dict[str, Any]]:
    """Return every rank's phases. Raises click.ClickException when a rank failed."""
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
    """Return every phase of the last step, on the rank that held most."""
    told = predicted(job, world)

    def row(name: str, mark: str, kind: str = "peak") -> Row:
        return Row(name, max(rank[mark][kind] for rank in ranks), told[name])

    last = job.steps - 1
    # otherwise device and host reach their peaks at different times
    if Zero(**job.zero).offload_optimizer is None:
        yield row("load", "load")
    for turn in range(job.micro_batches):
        again = f" {turn + 1}" if turn else ""
        yield row(f"forward{again}", f"{last}/{turn}/forward")
        yield row(f"backward{again}", f"{last}/{turn}/backward")
    yield row("step", f"{last}/step")
    yield row("between", f"{last}/step", "end")


def predicted(job: Job, world: int) -> dict[str, int]:
    """Return the bytes of device and host together, by phase, from the planners that `pipe plan`
    asks."""
    topology = Topology(ranks=world, local_ranks=world, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        planned = Planned.of(drawn_up(job, world, Path(folder)), topology)
        profiled = profile(planned)
        told = ask_planners(planned, profiled)
    strategy = told.require(StrategyMemory, "nothing wraps the model")
    found: dict[str, int] = {}
    for turn in range(job.micro_batches):
        again = f" {turn + 1}" if turn else ""
        peaks = step_peaks(profiled, strategy, samples=1, microbatches=turn + 1)
        held = {phase: one.bytes for phase, one in peaks["both"].items()}
        found |= {f"forward{again}": held[FORWARD], f"backward{again}": held[BACKWARD]}
        found |= {"load": held[LOAD], "step": held[UPDATE], "between": held[SAVE]}
    return found


def drawn_up(job: Job, world: int, folder: Path) -> Plan:
    """Return the job as a checked recipe."""
    text, recipe = folder / "text.txt", folder / "recipe.yaml"
    text.write_text("text\n", "utf-8")
    stages: dict[str, Any] = {"model": {"use": "model.hf", "config": dict(job.model)}}
    if job.lora is not None:
        stages["adapter"] = {"use": "adapter.lora", **job.lora}
    stages |= {
        "precision": {
            "use": "precision.policy",
            "compute": job.compute,
            "master": job.master,
            "reduce": job.reduce,
        },
        "data": {"use": "data.text", "files": str(text), "sequence_length": TOKENS},
        "optimizer": {"use": "optimizer.adamw", **job.optimizer},
        "wrap": {"use": "wrap.zero", **asdict(Zero(**job.zero))},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {
            "use": "train.causal_lm",
            "steps": 1,
            "micro_batch_size": 1,
            "global_batch_size": job.micro_batches * world,
        },
    }
    launch = {"procs": world, "device": "cpu"}
    whole = {"name": "zero", "launch": launch, "stages": stages}
    recipe.write_text(yaml.safe_dump(whole, sort_keys=False), "utf-8")
    return plan_file(recipe, forecast=True)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
