"""Mistakes in a wrap.zero slot that show before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipeline import OptimizerPlan, PlanView, Precision, Problem, UpdateRule, traits
from stages.model.config_checks import declarations
from stages.wrap.zero.config import STAGE_3_FIELDS, extra_problems
from stages.wrap.zero.stage import RULE

if TYPE_CHECKING:
    from stages.wrap.zero.stage import PlusPlus, Zero


def problems(stage: Zero, plan: PlanView) -> Iterator[Problem]:
    """Every problem of `stage`, keys relative to it."""
    yield from _stage_problems(stage)
    policy, master = plan.producer(stage, Precision), "fp32"
    if isinstance(policy, traits.DeclaresDtypes):
        master = policy.master
        for wrong, key, message, hint in _precision_rows(stage, policy):
            if wrong:
                yield Problem(key=key, message=message, hint=hint)
    if stage.stage == 3:
        yield from _selective_problems(stage, plan)
    if stage.plus_plus is not None:
        yield from _plus_plus_problems(stage, stage.plus_plus, plan)
    optimizer = plan.producer(stage, OptimizerPlan)
    if isinstance(optimizer, traits.DeclaresRules):
        yield from rule_problems(stage, master, optimizer.update_rules())
    yield from extra_problems(stage.extra)


def _stage_problems(stage: Zero) -> Iterator[Problem]:
    for key in ("offload_param", "plus_plus", *STAGE_3_FIELDS):
        if stage.stage < 3 and getattr(stage, key) is not None:
            yield Problem(key=key, message="needs stage 3", hint="set stage: 3 or leave it out")
    if stage.stage == 1 and stage.overlap_comm:
        message = "stage 1 reduces gradients once a step, not during backward"
        hint = "set stage: 2 or overlap_comm: false"
        yield Problem(key="overlap_comm", message=message, hint=hint)
    for block in ("offload_optimizer", "offload_param"):
        offload = getattr(stage, block)
        if offload is None:
            continue
        if offload.device == "nvme" and stage.stage < 3:
            yield Problem(key=f"{block}.device", message="nvme needs stage 3")
        if (offload.device == "nvme") != bool(offload.path):
            message = "device: nvme needs `path`, the folder that it writes to; cpu needs none"
            yield Problem(key=f"{block}.path", message=message)


def _precision_rows(stage: Zero, policy: traits.DeclaresDtypes) -> list[tuple[bool, str, str, str]]:
    """Whether it is wrong, key, message and hint of every demand on the dtypes."""
    offloaded, narrow = stage.offload_optimizer is not None, policy.master == "bf16"
    asks = "the precision slot asks for"
    return [
        (
            policy.compute == "fp16" and policy.reduce == "bf16",
            *("stage", "fp16 gradients cannot be reduced in bf16", ""),
        ),
        (policy.master == "fp16", "stage", f"{asks} fp16 master weights; ZeRO keeps fp32", ""),
        (
            narrow and not offloaded and stage.stage == 1,
            *("stage", f"{asks} bf16 master weights; stage 1 keeps fp32"),
            "set stage: 2 or 3, or add offload_optimizer",
        ),
        (
            narrow and offloaded and stage.optimizer_implementation == "torch",
            "optimizer_implementation",
            "offloaded bf16 master weights need DeepSpeed's CPU Adam",
            "set it to auto, leave offload_optimizer out, or set master: fp32 in the precision "
            "slot",
        ),
    ]


def _plus_plus_problems(stage: Zero, asked: PlusPlus, plan: PlanView) -> Iterator[Problem]:
    group = asked.secondary_partition
    if group is not None and plan.procs % group:
        message = f"{plan.procs} processes do not divide into groups of {group}"
        yield Problem(key="plus_plus.secondary_partition", message=message)
    if group is not None and stage.offload_param and stage.offload_param.device == "nvme":
        message = "DeepSpeed keeps no second copy on a disk"
        yield Problem(key="plus_plus.secondary_partition", message=message)
    if stage.tensor_parallel is not None and stage.tensor_parallel.size > 1:
        message = (
            "DeepSpeed builds the groups of ZeRO++ from all ranks, and with tensor_parallel these "
            "hold different parts of the layers"
        )
        yield Problem(key="plus_plus", message=message, hint="leave out tensor_parallel")
    for key in ("quantized_weights", "quantized_gradients"):
        if getattr(asked, key) and plan.device == "cpu":
            message = "DeepSpeed quantizes on GPUs only"
            yield Problem(key=f"plus_plus.{key}", message=message, hint="leave it out")
    policy = plan.producer(stage, Precision)
    if isinstance(policy, traits.DeclaresDtypes):
        # Its kernels read and write fp16, and take other gradients for fp16 as they are.
        if asked.quantized_weights and policy.compute == "fp32":
            message = "parameters would be rounded to fp16 before they are quantized"
            hint = "set compute: bf16 or fp16 in the precision slot"
            yield Problem(key="plus_plus.quantized_weights", message=message, hint=hint)
        if asked.quantized_gradients and policy.reduce != "fp16":
            message = f"DeepSpeed would take gradients in {policy.reduce} for fp16 ones"
            hint = "set reduce: fp16 in the precision slot"
            yield Problem(key="plus_plus.quantized_gradients", message=message, hint=hint)


def _selective_problems(stage: Zero, plan: PlanView) -> Iterator[Problem]:
    for model in declarations(stage, plan):
        if isinstance(model, traits.ChangesBlocks) and model.recomputes_operations:
            yield Problem(
                key="stage",
                message="the model slot's activation_checkpointing.keep makes torch repeat the "
                "operations of forward one by one, and stage 3 gathers parameters in between",
                hint="set keep: nothing there, or stage: 2",
            )


def rule_problems(stage: Zero, master: str, rules: Sequence[UpdateRule]) -> Iterator[Problem]:
    """Rules that DeepSpeed cannot run, or not with masters of a dtype under this offload."""
    message, whole = "", [rule.algorithm for rule in rules if not rule.elementwise]
    if whole:
        message = f"the optimizer slot's rule {whole[0]} needs whole matrices, and DeepSpeed "
        message += "divides all parameters together, as one flat tensor"
    elif len(rules) > 1:
        named = ", ".join(rule.algorithm for rule in rules)
        message = f"DeepSpeed takes one optimizer, the optimizer slot asks for {named}"
    if message:
        yield Problem(key="stage", message=message, hint="use wrap.fsdp, or another optimizer")
        return
    offload, algorithm = stage.offload_optimizer, rules[0].algorithm if rules else RULE
    if offload is None or algorithm == RULE:
        return
    if offload.device == "nvme":
        key, what, hint = "offload_optimizer.device", "nvme needs", "set device: cpu"
    elif master == "bf16":
        key, what = "offload_optimizer", "offloaded bf16 master weights need"
        hint = "leave it out or set master: fp32 in the precision slot"
    else:
        return
    asked = f"which computes {RULE}; the optimizer slot asks for {algorithm}"
    yield Problem(key=key, message=f"{what} DeepSpeed's CPU Adam, {asked}", hint=hint)
