"""Wrapping by Hugging Face accelerate, as its configuration file says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import (
    Context,
    Engine,
    ModelSource,
    OptimizerPlan,
    PipeError,
    PlanView,
    Precision,
    Problem,
    traits,
)
from pipeline.importing import read_config
from pipeline.utils import expanded
from stages.importing.draft import Draft
from stages.importing.hugging_face import TABLES

SHARDING = {"fsdp_config", "parallelism_config"}
"""Blocks that accelerate reads for FSDP only."""


@dataclass(frozen=True, kw_only=True)
class Accelerate:
    """Replicate or shard the model as a configuration file of Hugging Face accelerate says: with
    torch's DistributedDataParallel, or on GPUs with fully_shard (FSDP2).

    `accelerate.Accelerator` wraps model and optimizer; the file is read by accelerate's own
    launcher. The recipe decides batches, accumulation, clipping, dtypes and processes. Every
    process holds the whole model in host memory until FSDP shards it. `pipe import` translates such
    a file, also one for DeepSpeed, into a recipe without accelerate.
    """

    config: str
    """The file, as `accelerate config` writes it."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        try:
            content = read_config(expanded(self.config)).content
        except PipeError as error:
            yield Problem(key="config", message=str(error))
            return
        policy = plan.producer(self, Precision)
        for message, hint in _problems(self.config, content, plan, policy):
            yield Problem(key="config", message=message, hint=hint)

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.hf.accelerate_engine import build

        path = expanded(self.config)
        content = read_config(path).content
        sharded = str(content.get("distributed_type")).upper() == "FSDP"
        ctx.dist.require_same("accelerate configuration", content)
        return build(path, ctx, model, precision, optimizer, sharded=sharded)


def _problems(
    file: str, content: Mapping[str, Any], plan: PlanView, policy: Any
) -> Iterator[tuple[str, str]]:
    """Message and hint of every problem of a configuration file next to a precision `policy`."""
    kind = str(content.get("distributed_type")).upper()
    if "distributed_type" not in content:
        yield f"{file} is not an accelerate configuration: no distributed_type", ""
        return
    if kind == "DEEPSPEED":
        message = "distributed_type is DEEPSPEED: accelerate only hands the settings on to it"
        yield message, f"run `pipe import {file}`, which makes a recipe of them"
        return
    if kind == "NO" and plan.procs > 1:
        message = f"distributed_type NO is for one process, and there are {plan.procs}"
        yield message, "set it to MULTI_GPU or MULTI_CPU"
    # Keys that no recipe expresses: accelerate cannot add them to a recipe either.
    unread = {"deepspeed_config"} | (set() if kind == "FSDP" else SHARDING)
    name, draft = Path(file).name, Draft()
    draft.read(name, {k: v for k, v in content.items() if k not in unread}, TABLES["accelerate"])
    for entry in draft.entries:
        if entry.left_out:
            yield f"{entry.key} in {name}: {entry.why or 'is not translated'}", entry.hint
    if kind == "FSDP":
        block = content.get("fsdp_config") or {}
        if str(block.get("fsdp_version", 1)) != "2":
            message = "FSDP1 joins parameters into flat ones, which no checkpoint tells apart"
            yield message, "set fsdp_version: 2 (`accelerate to-fsdp2` converts the file)"
        if block.get("fsdp_activation_checkpointing"):
            message = "fsdp_activation_checkpointing renames parameters in checkpoints"
            yield message, "set it false, and activation_checkpointing: {} in the model slot"
        if plan.device == "cpu":
            message = "accelerate shards on GPUs only; on the CPU it would replicate"
            yield message, "use wrap.fsdp there"
    if isinstance(policy, traits.DeclaresDtypes):
        yield from _dtypes(str(content.get("mixed_precision")).lower(), policy, kind == "FSDP")


def _dtypes(named: str, policy: traits.DeclaresDtypes, sharded: bool) -> Iterator[tuple[str, str]]:
    compute = named if named in ("fp16", "bf16") else "fp32"
    if compute != policy.compute:
        message = f"mixed_precision computes in {compute}, the precision slot in {policy.compute}"
        yield message, "say the same in both"
    elif compute != "fp32" and not sharded:
        message = f"accelerate replicates in {compute} by autocast, which leaves operators in fp32"
        yield message, "use wrap.ddp, which casts as the precision slot says"
    elif compute != "fp32" and policy.reduce != compute:
        message = f"accelerate averages gradients in {compute}, the precision slot in"
        yield f"{message} {policy.reduce}", f"set reduce: {compute} there"
    if policy.master != "fp32":
        yield "accelerate keeps fp32 masters", "set master: fp32"
