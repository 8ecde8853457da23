"""Who updates the weights: DeepSpeed's kernels or the optimizer stage's torch class."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.wrap.zero.stage import Zero

RULE = "adamw"
"""The update rule that DeepSpeed's kernels (CPU Adam, fused Adam) compute here, as an OptimizerPlan
names it."""


def uses_deepspeed_kernel(stage: Zero, algorithm: str) -> bool:
    """Whether DeepSpeed's own kernel updates the weights; `auto` takes it when offloaded, if there
    is one."""
    if stage.optimizer_implementation == "auto":
        return stage.offload_optimizer is not None and algorithm == RULE
    return stage.optimizer_implementation == "deepspeed"
