"""Mistakes in a wrap.zero slot that show before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipeline import ModelSource, OptimizerPlan, PlanView, Precision, Problem
from stages.wrap.zero.config import STAGE_3_FIELDS, extra_problems
from stages.wrap.zero.stage import RULE

if TYPE_CHECKING:
    from stages.wrap.zero.stage import OptimizerOffload, ParameterOffload, Zero

ON_HOST = {"device", "pin_memory", "ratio"}
"""Fields of the offload blocks that apply to device cpu; the others are for nvme alone."""


def problems(stage: Zero, plan: PlanView) -> Iterator[Problem]:
    """Every problem of `stage`, keys relative to it."""
    yield from _stage_problems(stage)
    yield from _optimizer_offload_problems(stage)
    if stage.offload_param is not None:
        yield from _device_problems("offload_param", stage.offload_param)
    yield from _aio_problems(stage, plan)
    for policy in plan.giving(Precision):
        yield from _precision_problems(stage, policy)
    if stage.stage == 3:
        yield from _selective_problems(plan)
    yield from _rule_problems(stage, plan)
    yield from extra_problems(stage.extra)


def _stage_problems(stage: Zero) -> Iterator[Problem]:
    if stage.stage < 3:
        for key in ("offload_param", *STAGE_3_FIELDS):
            if getattr(stage, key) is not None:
                yield Problem(key=key, message="needs stage 3", hint="set stage: 3 or leave it out")
    elif stage.round_robin_gradients is not None:
        yield Problem(key="round_robin_gradients", message="does nothing at stage 3")
    if stage.stage == 1 and stage.overlap_comm:
        yield Problem(
            key="overlap_comm",
            message="stage 1 reduces gradients once a step, not during backward",
            hint="set stage: 2 or overlap_comm: false",
        )


def _optimizer_offload_problems(stage: Zero) -> Iterator[Problem]:
    offload = stage.offload_optimizer
    if offload is None:
        return
    yield from _device_problems("offload_optimizer", offload)
    if offload.device == "nvme" and stage.stage < 3:
        yield Problem(key="offload_optimizer.device", message="nvme needs stage 3")
    if offload.fast_init and (stage.offload_param is None or stage.offload_param.device != "nvme"):
        yield Problem(
            key="offload_optimizer.fast_init", message="needs offload_param with device nvme too"
        )
    needs = {
        "stage 3": stage.stage == 3,
        "device cpu": offload.device == "cpu",
        "optimizer_implementation auto or deepspeed": stage.optimizer_implementation != "torch",
    }
    for need, met in needs.items() if offload.ratio < 1 else ():
        if not met:
            yield Problem(key="offload_optimizer.ratio", message=f"below 1 needs {need}")


def _device_problems(block: str, offload: OptimizerOffload | ParameterOffload) -> Iterator[Problem]:
    if offload.device == "nvme":
        if not offload.path:
            yield Problem(key=f"{block}.path", message="nvme needs the folder to write to")
        return
    for key, value in vars(offload).items():
        if key not in ON_HOST and value != type(offload).__dataclass_fields__[key].default:
            yield Problem(key=f"{block}.{key}", message="only applies to device nvme")


def _aio_problems(stage: Zero, plan: PlanView) -> Iterator[Problem]:
    if stage.aio is None:
        return
    offloads = (stage.offload_optimizer, stage.offload_param)
    if not any(offload is not None and offload.device == "nvme" for offload in offloads):
        yield Problem(key="aio", message="only applies to an nvme offload")
    if stage.aio.use_gds and plan.device != "cuda":
        yield Problem(key="aio.use_gds", message="needs a GPU")


def _selective_problems(plan: PlanView) -> Iterator[Problem]:
    for model in plan.giving(ModelSource):
        settings = getattr(model, "activation_checkpointing", None)
        if settings is not None and settings.keep != "nothing":
            yield Problem(
                key="stage",
                message="the model slot's activation_checkpointing.keep makes torch repeat the "
                "operations of forward one by one, and stage 3 gathers parameters in between",
                hint="set keep: nothing there, or stage: 2",
            )


def _precision_problems(stage: Zero, policy: Any) -> Iterator[Problem]:
    offloaded = stage.offload_optimizer is not None
    if policy.compute == "fp16" and policy.reduce == "bf16":
        yield Problem(key="stage", message="fp16 gradients cannot be reduced in bf16")
    if policy.master == "fp16":
        yield Problem(
            key="stage", message="the precision slot asks for fp16 master weights; ZeRO keeps fp32"
        )
    elif policy.master == "bf16" and not offloaded and stage.stage == 1:
        yield Problem(
            key="stage",
            message="the precision slot asks for bf16 master weights; stage 1 keeps fp32",
            hint="set stage: 2 or 3, or add offload_optimizer",
        )
    elif policy.master == "bf16" and offloaded and stage.optimizer_implementation == "torch":
        yield Problem(
            key="optimizer_implementation",
            message="offloaded bf16 master weights need DeepSpeed's CPU Adam",
            hint="set it to auto, leave offload_optimizer out, or set master: fp32 in the "
            "precision slot",
        )


def _rule_problems(stage: Zero, plan: PlanView) -> Iterator[Problem]:
    """Settings that need DeepSpeed's kernels while the optimizer slot asks for another rule."""
    masters = {policy.master for policy in plan.giving(Precision)}
    offload = stage.offload_optimizer
    for optimizer in plan.giving(OptimizerPlan):
        algorithm = getattr(optimizer, "algorithm", RULE)
        if algorithm == RULE:
            continue
        kernels = (
            f"DeepSpeed's kernels, which compute {RULE}; the optimizer slot asks for {algorithm}"
        )
        if stage.optimizer_implementation == "deepspeed":
            yield Problem(
                key="optimizer_implementation",
                message=f"means {kernels}",
                hint="set it to auto or torch",
            )
        elif offload is not None and offload.device == "nvme":
            yield Problem(
                key="offload_optimizer.device",
                message=f"nvme needs {kernels}",
                hint="set device: cpu",
            )
        elif offload is not None and "bf16" in masters:
            yield Problem(
                key="offload_optimizer",
                message=f"offloaded bf16 master weights need {kernels}",
                hint="leave it out or set master: fp32 in the precision slot",
            )
