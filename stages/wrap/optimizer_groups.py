"""The plan's groups of parameters: in a torch optimizer, and in a training state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipeline import EngineState, NamedParameter, OptimizerPlan
from stages.wrap.build import named_parameters
from stages.wrap.optimizer_state import fixed_state


def make_optimizer(plan: OptimizerPlan, module: nn.Module) -> Optimizer:
    """The plan's optimizer of the module; each group keeps its base rate as `initial_lr`."""
    return build_optimizer(plan, plan.groups(named_parameters(module)))


def build_optimizer(plan: OptimizerPlan, groups: Iterable[Mapping[str, Any]]) -> Optimizer:
    """Build the plan's optimizer from groups of parameters. A group whose parameters lie on
    different meshes is split, as torch updates a group's parameters together."""
    optimizer = plan.build(
        [{**group, "params": params} for group in groups for params in _by_mesh(group["params"])]
    )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def grouped_state(
    module: nn.Module, plan: OptimizerPlan, named: Iterable[NamedParameter]
) -> EngineState:
    """The part of a training state that never changes, in the plan's groups of `named` parameters,
    which are those of `module` or stand for them."""
    held = [one for one in named if one.parameter.numel()]
    names = {one.parameter: one.name for one in held}
    groups = [
        (settings, float(settings["lr"]), [names[one] for one in settings["params"]])
        for group in plan.groups(held)
        for settings in [{**plan.hyperparameters, **group}]
    ]
    return fixed_state(module, plan, groups, lambda tensor: tuple(tensor.shape))


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(found.values())
