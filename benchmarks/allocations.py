"""Compare `pipe plan`'s memory of each strategy with the bytes that torch's allocator hands out.

    python benchmarks/allocations.py [--only "stage 3"] [--json FILE]

Every configuration trains a small random model with the real engine for three steps on CPU ranks;
the last step is compared, phase by phase, on the rank that holds most, with the forecast from the
model's profile and the strategy's share. Exits 1 when a phase is off by more than 5 %. See
docs/dev/zero-memory.md.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import allocations_rank
import click
import raw
from allocations_rank import SPOKEN, STEPS, TOKENS
from memories.cases import Case, own
from memories.compare import forecast, job
from overhead import run_to_end
from tables import markdown

from pipeline.planning.estimate import step_peaks
from pipeline.planning.forecast import BACKWARD, FORWARD, LOAD, SAVE, UPDATE

LIMIT = 0.05
QUANTIZING = 8 << 20
"""Bytes of the host that quantizing takes at most while weights are loaded, and a plan leaves out:
what is read at a time, and its values and codes."""
HOST = {"offload_optimizer": {"device": "cpu"}}
BOTH = {**HOST, "offload_param": {"device": "cpu"}}
BUCKET = {"reduce_bucket_size": 500_000}
NONE_PERSIST = {"param_persistence_threshold": 1000}
THREE = {**BUCKET, **NONE_PERSIST}

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


def small(name: str, wrap: str, strategy: Mapping[str, Any], **fields: Any) -> Case:
    """Return a case of two ranks and two micro-batches, with the small model or the given one."""
    model = own(**fields.pop("model", SMALL))
    settings = {"ranks": 2, "accumulation": 2, "length": TOKENS, **fields}
    return Case(name=name, wrap=wrap, strategy=strategy, model=model, **settings)


def zero(stage: int, name: str = "", **fields: Any) -> Case:
    """Return a case under ZeRO. `strategy` are further fields of the wrap slot."""
    strategy = {"stage": stage, **fields.pop("strategy", {})}
    return small(f"stage {stage}{name and f', {name}'}", "zero", strategy, **fields)


LORA, PACKED = {"rank": 16}, {"rank": 16, "quantize": "nf4"}
CASES = (
    small("DDP", "ddp", {}),
    small("DDP, 1 rank", "ddp", {}, ranks=1),
    small("DDP, 4 ranks", "ddp", {}, ranks=4),
    small("DDP, fp32", "ddp", {}, compute="fp32"),
    small("DDP, no views", "ddp", {"gradient_as_bucket_view": False}, compute="fp32"),
    small("DDP, bf16 masters", "ddp", {}, master="bf16", reduce="bf16"),
    small("DDP, tied", "ddp", {}, model=TIED),
    small("DDP, LoRA, 31 M", "ddp", {}, adapter=LORA, model=LARGER),
    small("DDP, nf4, 31 M", "ddp", {}, adapter=PACKED, model=LARGER),
    small("FSDP", "fsdp", {}),
    small("FSDP, 1 rank", "fsdp", {}, ranks=1),
    small("FSDP, 4 ranks", "fsdp", {}, ranks=4),
    small("FSDP, fp32", "fsdp", {}, compute="fp32"),
    small("FSDP, grad op", "fsdp", {"sharding": "shard_grad_op"}),
    small("FSDP, late", "fsdp", {"reduce_every_microbatch": False}),
    small("FSDP, hybrid", "fsdp", {"sharding": "hybrid_shard", "shard_size": 2}, ranks=4),
    small("FSDP, bf16 masters", "fsdp", {}, master="bf16", reduce="bf16"),
    small("FSDP, tied", "fsdp", {}, model=TIED),
    small("FSDP, LoRA, 31 M", "fsdp", {}, adapter=LORA, model=LARGER),
    small("FSDP, nf4, 31 M", "fsdp", {}, adapter=PACKED, model=LARGER),
    zero(1),
    zero(1, "1 rank", ranks=1),
    zero(1, "reduce bf16", reduce="bf16"),
    zero(1, "fp16", strategy=BUCKET, compute="fp16", precision={"initial_loss_scale": 1024.0}),
    zero(1, "fp32", strategy=BUCKET, compute="fp32"),
    zero(1, "offload", strategy=BUCKET | HOST),
    zero(1, "31 M", model=LARGER),
    zero(2, strategy=BUCKET),
    zero(2, "1 rank", strategy=BUCKET, ranks=1),
    zero(2, "4 ranks", strategy=BUCKET, ranks=4),
    zero(2, "bucket of 20 M", strategy={"reduce_bucket_size": 20_000_000}),
    zero(2, "bucket of 0.1 M", strategy={"reduce_bucket_size": 100_000}),
    zero(2, "overlap", strategy=BUCKET | {"overlap_comm": True}),
    zero(2, "not contiguous", strategy=BUCKET | {"contiguous_gradients": False}),
    zero(2, "bf16 masters", strategy=BUCKET, master="bf16"),
    zero(2, "fp32", strategy=BUCKET, compute="fp32"),
    zero(2, "tied", strategy={"reduce_bucket_size": 1_000_000}, model=TIED),
    zero(2, "LoRA, 31 M", strategy=BUCKET, adapter=LORA, model=LARGER),
    zero(2, "nf4, 31 M", strategy=BUCKET, adapter=PACKED, model=LARGER),
    zero(2, "offload", strategy=BUCKET | HOST),
    zero(2, "offload, fp32", strategy=BUCKET | HOST, compute="fp32"),
    zero(3, strategy=THREE),
    zero(3, "1 rank", strategy=THREE, ranks=1),
    zero(3, "4 ranks", strategy=THREE, ranks=4),
    zero(3, "defaults but the bucket", strategy=BUCKET),
    zero(
        3, "no prefetch or reuse",
        strategy=THREE | {"prefetch_bucket_size": 0, "max_reuse_distance": 0},
    ),
    zero(
        3, "few live",
        strategy={
            **THREE, "prefetch_bucket_size": 100_000, "max_reuse_distance": 100_000,
            "max_live_parameters": 500_000,
        },
    ),
    zero(3, "sub-groups", strategy=THREE | {"sub_group_size": 300_000}),
    zero(3, "fp16", strategy=THREE, compute="fp16", precision={"initial_loss_scale": 1024.0}),
    zero(3, "fp32", strategy=THREE, compute="fp32"),
    zero(3, "reduce bf16", strategy=THREE, reduce="bf16"),
    zero(3, "tied", strategy={"reduce_bucket_size": 1_000_000}, model=TIED),
    zero(3, "LoRA, 31 M", strategy=THREE, adapter=LORA, model=LARGER),
    zero(3, "nf4, 31 M", strategy=THREE, adapter=PACKED, model=LARGER),
    zero(3, "31 M", strategy={"reduce_bucket_size": 3_000_000}, model=LARGER),
    zero(
        3, "31 M, few live",
        strategy={
            "reduce_bucket_size": 3_000_000, "max_live_parameters": 10_000_000,
            "max_reuse_distance": 0, "prefetch_bucket_size": 3_000_000,
        },
        model=LARGER,
    ),
    zero(3, "offload", strategy=THREE | HOST),
    zero(3, "offload both", strategy=THREE | BOTH),
)  # fmt: skip


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
        rows = [
            {"configuration": name, **one._asdict(), "error": one.error}
            for name, phases in found.items()
            for one in phases
        ]
        raw.write(json_file, "allocations", rows)
    sys.exit(any(abs(row.error) > LIMIT for rows in found.values() for row in rows))


def every_configuration(only: str = "") -> dict[str, list[Row]]:
    """Return measured and forecast phases of all configurations whose names begin with `only`."""
    found = {}
    for case in CASES:
        if case.name.startswith(only):
            click.echo(f"{case.name} ...", err=True)
            found[case.name] = list(compared(case, measure(case)))
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


def measure(case: Case) -> list[dict[str, Any]]:
    """Return every rank's phases. Raises click.ClickException when a rank failed."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        run_to_end([
            context.Process(
                target=allocations_rank.main, args=(case, rank, case.ranks, folder), daemon=True
            )
            for rank in range(case.ranks)
        ])  # fmt: skip
        files = [Path(folder, f"rank-{rank}.json") for rank in range(case.ranks)]
        if not all(file.exists() for file in files):
            said = (f.read_text("utf-8")[-3000:] for f in Path(folder).glob(f"{SPOKEN}*"))
            raise click.ClickException("\n".join([f"a rank failed: {case}", *said]))
        return [json.loads(file.read_text("utf-8")) for file in files]


def compared(case: Case, ranks: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Return every phase of the last step, on the rank that held most."""
    told = predicted(case)

    def row(name: str, mark: str, kind: str = "peak") -> Row:
        return Row(name, max(rank[mark][kind] for rank in ranks), told[name])

    last = STEPS - 1
    # otherwise device and host reach their peaks at different times
    if "offload_optimizer" not in case.strategy:
        loading = row("load", "load")
        if "quantize" in (case.adapter or {}):
            loading = loading._replace(
                measured=min(
                    loading.measured, max(loading.measured - QUANTIZING, loading.predicted)
                )
            )
        yield loading
    # of fewer micro-batches, all are reduced by the last
    late = case.strategy.get("reduce_every_microbatch") is False
    for turn in range(case.accumulation - 1 if late else 0, case.accumulation):
        again = f" {turn + 1}" if turn else ""
        yield row(f"forward{again}", f"{last}/{turn}/forward")
        yield row(f"backward{again}", f"{last}/{turn}/backward")
    yield row("step", f"{last}/step")
    yield row("between", f"{last}/step", "end")


def predicted(case: Case) -> dict[str, int]:
    """Return the bytes of device and host together, by phase, from the planners that `pipe plan`
    asks."""
    with tempfile.TemporaryDirectory() as folder:
        profiled, strategy, _ = forecast(job(case, Path(folder), "cpu"))
    found: dict[str, int] = {}
    for turn in range(case.accumulation):
        again = f" {turn + 1}" if turn else ""
        peaks = step_peaks(profiled, strategy, samples=1, microbatches=turn + 1)
        held = {phase: one.bytes for phase, one in peaks["both"].items()}
        found |= {f"forward{again}": held[FORWARD], f"backward{again}": held[BACKWARD]}
        found |= {"load": held[LOAD], "step": held[UPDATE], "between": held[SAVE]}
    return found


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
