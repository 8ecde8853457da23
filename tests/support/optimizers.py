"""Optimizers of one part, made as engines make them."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from pipeline import NamedParameter, OptimizerPlan


def made_of(plan: OptimizerPlan, named: Iterable[NamedParameter]) -> Optimizer:
    """Return the optimizer of a plan's only part."""
    (part,), (own,) = plan.parts, plan.divide(named)
    return part.build(part.groups(own))
