"""The plan's parts and their groups of parameters: in torch optimizers, and in a training state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from pipeline import EngineState, NamedParameter, OptimizerPart, OptimizerPlan, StageError
from pipeline.utils import local_part
from stages.wrap.build import named_parameters
from stages.wrap.optimizer_state import fixed_state, group_state, require_zeros
from stages.wrap.whole_matrices import MatrixExchange


class LivePart(NamedTuple):
    """A part of the plan with the optimizer of its parameters on this rank."""

    number: int
    """Its place in the plan."""
    plan: OptimizerPart
    optimizer: Optimizer


def make_optimizers(plan: OptimizerPlan, module: nn.Module) -> list[LivePart]:
    """The plan's optimizers of the module; see `build_optimizers`."""
    return build_optimizers(plan, list(named_parameters(module)))


def build_optimizers(
    plan: OptimizerPlan,
    named: Iterable[NamedParameter],
    here: Collection[nn.Parameter] | None = None,
) -> list[LivePart]:
    """The optimizers of the parts that have parameters on this rank, which are those in `here`, or
    all of `named`. Each group keeps its base rate as `initial_lr`. Raises StageError if nothing is
    trained."""
    found = []
    for number, (part, own) in enumerate(zip(plan.parts, plan.divide(named), strict=True)):
        groups = [
            {**group, "params": same}
            for group in (groups_of(part, own) if own else ())
            for same in _by_mesh(one for one in group["params"] if here is None or one in here)
        ]
        if groups:
            require_zeros(part, local_part(groups[0]["params"][0]).device)
            whole = () if part.elementwise else (MatrixExchange(),)
            optimizer = part.build(groups, *whole)
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]
            found.append(LivePart(number, part, optimizer))
    if plan.parts and not found:
        raise StageError(
            "the optimizer has nothing to train: every parameter of the model is frozen",
            hint="look at the model slot and its adapter",
        )
    return found


def groups_of(part: OptimizerPart, own: Sequence[NamedParameter]) -> list[dict[str, Any]]:
    """The part's parameters in its groups. Raises StageError unless each is in one of them."""
    groups = part.groups(own)
    taken = Counter(id(one) for group in groups for one in group["params"])
    for one in own:
        if taken[id(one.parameter)] != 1:
            times = f"in {taken[id(one.parameter)]} groups"
            raise StageError(f"{part.name or part.algorithm} has {one.name} {times}, not in one")
    return groups


def grouped_state(
    module: nn.Module, plan: OptimizerPlan, named: Iterable[NamedParameter]
) -> EngineState:
    """The part of a training state that never changes, in the plan's groups of `named` parameters,
    which are those of `module` or stand for them."""
    held = [one for one in named if one.parameter.numel()]
    names = {one.parameter: one.name for one in held}
    groups = [
        group_state(part, group, [names[one] for one in group["params"]])
        for part, own in zip(plan.parts, plan.divide(held), strict=True)
        for group in (groups_of(part, own) if own else ())
    ]
    return fixed_state(module, groups, lambda tensor: tuple(tensor.shape))


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters by the mesh on which they lie, as torch updates a group's together."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(found.values())
