"""What an accelerate configuration file says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contracts.engine import Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision
from pipeline.contracts.stage import Context, PlanView
from pipeline.errors import PipeError, Problem
from pipeline.importing.files import read_config
from stages.importing.engines import ACCELERATE
from stages.importing.report import Report
from stages.wrap.accelerate_handed import HandedOn


@dataclass(frozen=True, kw_only=True)
class Accelerate:
    """Replicate or shard the model as a configuration file of Hugging Face accelerate says: with
    torch's DistributedDataParallel, on GPUs with fully_shard (FSDP2), or with DeepSpeed.

    `accelerate.Accelerator` wraps model and optimizer; the file is read by accelerate's own
    launcher. Settings that accelerate would only hand on to DeepSpeed go to wrap.zero. Batches,
    accumulation, clipping, dtypes and processes are those of the recipe. Every process holds the
    whole model in host memory until FSDP shards it. `pipe import` translates such a file into a
    recipe that does without accelerate.
    """

    config: str
    """The file, as `accelerate config` writes it."""

    def check(self, plan: PlanView) -> Iterator[Problem]:

        yield from problems(self, plan)

    def run(
        self, ctx: Context, model: ModelSource, precision: Precision, optimizer: OptimizerPlan
    ) -> Engine:
        from stages.wrap.accelerate_handed import HandedOn

        path = Path(self.config).expanduser()
        if is_handed_on(read_config(path).content):
            engine: Engine = HandedOn(path, KEY).stage.run(ctx, model, precision, optimizer)
            return engine
        from stages.wrap.accelerate_engine import build

        return build(self, ctx, model, precision, optimizer)


KEY = "config"
SHARDING = {"fsdp_config", "parallelism_config"}
"""Blocks that accelerate reads for FSDP alone."""
NARROW = ("fp16", "bf16")


def problems(stage: Accelerate, plan: PlanView) -> Iterator[Problem]:
    """Every problem of the file; keys of it are named in the message."""
    path = Path(stage.config).expanduser()
    try:
        content = read_config(path).content
    except PipeError as error:
        yield Problem(key=KEY, message=str(error))
        return
    if "distributed_type" not in content:
        yield Problem(
            key=KEY, message=f"{path} is no accelerate configuration: no distributed_type"
        )
        return
    yield from _launch(content, plan)
    if is_handed_on(content):
        yield from HandedOn(path, KEY).problems(plan)
        return
    yield from _refused(path.name, content)
    yield from _strategy(content, plan)
    for policy in plan.giving(Precision):
        yield from _precision(content, policy)


def is_sharded(content: Mapping[str, Any]) -> bool:
    """Whether the file asks for FSDP."""
    return str(content.get("distributed_type")).upper() == "FSDP"


def is_handed_on(content: Mapping[str, Any]) -> bool:
    """Whether accelerate would only hand its settings on."""
    return str(content.get("distributed_type")).upper() == "DEEPSPEED"


def _refused(file: str, content: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for every key that no recipe expresses."""
    unread = {"deepspeed_config"} | (set() if is_sharded(content) else SHARDING)
    report = Report()
    report.read(file, {k: v for k, v in content.items() if k not in unread}, ACCELERATE)
    for entry in report.entries:
        if entry.left_out:
            message = f"{entry.key} in {file}: {entry.why or 'is not translated'}"
            yield Problem(key=KEY, message=message, hint=entry.hint)


def _strategy(content: Mapping[str, Any], plan: PlanView) -> Iterator[Problem]:
    kind = str(content["distributed_type"]).upper()
    block = content.get("fsdp_config")
    if kind == "FSDP":
        version = block.get("fsdp_version", 1) if isinstance(block, Mapping) else 1
        if str(version) != "2":
            yield Problem(
                key=KEY,
                message="FSDP1 joins parameters into flat ones, which no checkpoint tells apart",
                hint="set fsdp_version: 2 (`accelerate to-fsdp2` converts the file)",
            )
        if isinstance(block, Mapping) and block.get("fsdp_activation_checkpointing"):
            yield Problem(
                key=KEY,
                message="accelerate's fsdp_activation_checkpointing renames parameters, so that "
                "nothing else reads the checkpoints",
                hint="set it false there, and activation_checkpointing: {} in the model slot",
            )
        if plan.device == "cpu":
            message = "accelerate shards on GPUs only; on the CPU it would replicate"
            yield Problem(key=KEY, message=message, hint="use wrap.fsdp there")
    elif kind == "NO" and plan.procs > 1:
        message = f"distributed_type NO is for one process, and there are {plan.procs}"
        yield Problem(key=KEY, message=message, hint="set it to MULTI_GPU or MULTI_CPU")


def _launch(content: Mapping[str, Any], plan: PlanView) -> Iterator[Problem]:
    count = content.get("num_processes")
    if isinstance(count, int) and count not in (-1, plan.procs):
        yield Problem(
            key=KEY,
            message=f"num_processes is {count}, but the recipe starts {plan.procs}",
            hint="set launch.procs, or num_processes: -1",
        )
    if content.get("use_cpu") is True and plan.device != "cpu":
        yield Problem(key=KEY, message="use_cpu is set, but the recipe runs on GPUs")


def _precision(content: Mapping[str, Any], policy: Any) -> Iterator[Problem]:
    said = str(content.get("mixed_precision")).lower()
    asked = said if said in NARROW else "fp32"
    if asked != policy.compute:
        yield Problem(
            key=KEY,
            message=f"mixed_precision computes in {asked}, the precision slot in {policy.compute}",
            hint="say the same in both",
        )
    elif asked != "fp32" and not is_sharded(content):
        yield Problem(
            key=KEY,
            message=f"accelerate replicates in {asked} by autocast, which leaves operators in fp32",
            hint="use wrap.ddp, which casts as the precision slot says",
        )
    elif asked != "fp32" and policy.reduce != asked:
        yield Problem(
            key=KEY,
            message=f"accelerate averages gradients in {asked}, the precision slot in "
            f"{policy.reduce}",
            hint=f"set reduce: {asked} there",
        )
    if policy.master != "fp32":
        yield Problem(key=KEY, message="accelerate keeps fp32 masters", hint="set master: fp32")
