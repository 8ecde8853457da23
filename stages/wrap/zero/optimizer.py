"""Which implementation of the plan's update rule runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn

from pipeline.artifacts import NamedParameter, OptimizerPlan
from pipeline.errors import StageError
from stages.wrap.zero.kernels import RULE, uses_deepspeed_kernel

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stages.wrap.zero.stage import Zero


def make_optimizer(stage: Zero, plan: OptimizerPlan, module: nn.Module) -> Optimizer:
    """The optimizer over the module's parameters, before DeepSpeed takes it apart.

    Raises StageError when DeepSpeed's kernel was asked for by name and has no such rule.
    """
    groups = plan.groups(_named_parameters(module))
    if not uses_deepspeed_kernel(stage, plan.algorithm):
        return plan.build(groups)
    if plan.algorithm != RULE:
        raise StageError(
            f"DeepSpeed's kernels compute {RULE}, the optimizer slot asks for {plan.algorithm}",
            hint="set optimizer_implementation: torch",
        )
    return _adamw(groups, plan, offloaded=stage.offload_optimizer is not None)


def _adamw(groups: list[dict[str, Any]], plan: OptimizerPlan, *, offloaded: bool) -> Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    if offloaded:
        optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **plan.hyperparameters)
    else:
        optimizer = FusedAdam(groups, adam_w_mode=True, **plan.hyperparameters)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _named_parameters(module: nn.Module) -> list[NamedParameter]:
    """Parameters with their full shapes, which a partitioned one keeps in `ds_shape`; every rank
    has masters of its own."""
    shard = torch.distributed.get_rank()
    return [
        NamedParameter(
            name, parameter, tuple(getattr(parameter, "ds_shape", parameter.shape)), shard
        )
        for name, parameter in module.named_parameters()
    ]
