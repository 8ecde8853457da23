"""The share of a model that experts hold: one tensor for all, which gets no low-rank update."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from pipeline import PlanView, Problem
from stages.model.hf import HfModel
from stages.model.read import config_at_hand

if TYPE_CHECKING:
    from torch import nn

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
SKIPPED = "experts that are one tensor, which get no update"
HINT = "train_also: ['*.experts.*'] trains them as a whole"


def skipped_experts(plan: PlanView) -> Iterator[Problem]:
    """A warning where the recipe's model has experts, by its config."""
    model = plan.find(HfModel)
    config = (model and config_at_hand(model)) or {}
    if any(config.get(key) for key in COUNTS):
        message = f"all-linear leaves out {SKIPPED}"
        yield Problem(key="targets", message=message, hint=HINT, warning=True)


def expert_share(model: nn.Module, trained: Collection[str] = ()) -> float:
    """The part of a module's parameters that experts in one tensor are, without those `trained`."""
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    experts = sum(
        sizes[name]
        for name, one in model.named_parameters()
        if one.dim() == 3 and "expert" in name and name not in trained
    )
    return experts / sum(sizes.values())
