"""The optimizer step that all plain-torch engines share: scale, clip, apply, clear."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pipeline.contracts.engine import StepGuard, StepReport
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision


def make_scaler(precision: Precision, device: torch.device) -> GradScaler | None:
    """The dynamic loss scaler that the policy asks for, on the gradients' `device`; None without
    one."""
    scaling = precision.loss_scaling
    if scaling is None:
        return None
    scaler = GradScaler(
        device.type, init_scale=scaling.initial_scale, growth_interval=scaling.growth_interval
    )
    # The scale is placed at first use: beside the gradients, not beside an offloaded model's loss.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def make_optimizer(plan: OptimizerPlan, groups: list[dict[str, object]]) -> Optimizer:
    """The plan's optimizer, each group remembering its base rate as `initial_lr`."""
    optimizer = plan.build(groups)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def apply_step(
    optimizer: Optimizer,
    scaler: GradScaler | None,
    *,
    lr_scale: float,
    max_grad_norm: float | None,
    should_step: StepGuard | None = None,
    keep_gradients: bool = False,
) -> StepReport:
    """One optimizer step over accumulated gradients (collective where they are sharded), left out
    where `should_step` says no to their norm.

    With `keep_gradients` they are zeroed where they are. An overflow (non-finite gradient under
    loss scaling) skips the step and halves the scale.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * lr_scale
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = clip(parameters, max_grad_norm)
    # Without anyone to ask, the host does not wait for the norm before it starts the update.
    applied, scale = should_step is None or should_step(float(norm)), 1.0
    if scaler is None:
        if applied:
            optimizer.step()
    else:
        scale = scaler.get_scale()
        if applied:
            scaler.step(optimizer)
        scaler.update()  # by what was found when gradients were unscaled
        applied = applied and scaler.get_scale() >= scale
    optimizer.zero_grad(set_to_none=not keep_gradients)
    return StepReport(grad_norm=float(norm), applied=applied, loss_scale=scale)


def clip(parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale gradients down to the global L2 norm `max_norm`; return the norm before, a scalar.

    Norms are accumulated in fp32 over the whole model, on all ranks that hold a part of it.
    """
    norm = _norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


def _norm(gradients: list[Tensor]) -> Tensor:
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients, foreach=True)
    # torch's foreach norms accumulate in the gradients' own dtype.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def scaled(loss: Tensor, scaler: GradScaler | None) -> Tensor:
    """`loss` times the loss scale, if there is one."""
    return loss if scaler is None else scaler.scale(loss)
