"""The plan's parts and their groups of parameters, in torch optimizers and in a training state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline import EngineState, NamedParameter, OptimizerPart, OptimizerPlan, StageError
from pipeline.utils import local_part
from stages.wrap.build import named_parts
from stages.wrap.optimizer_state import fixed_state, group_state, require_zeros
from stages.wrap.whole_matrices import MatrixExchange


class LivePart(NamedTuple):
    """A part of the plan with the optimizer of its parameters on this rank."""

    number: int
    """Its place in the plan."""
    plan: OptimizerPart
    optimizer: Optimizer

    def state(self, parameter: Tensor) -> dict[str, Any]:
        """A parameter's state, for which a rule may make a new mapping in each update."""
        found: dict[str, Any] = self.optimizer.state[parameter]
        return found


def make_optimizers(
    plan: OptimizerPlan, module: nn.Module, parts: Sequence[nn.Module] | None = None
) -> list[LivePart]:
    """The optimizers of the plan's parts that have parameters on this rank, in groups of the whole
    `module`, of which the rank may have `parts` only. Each group keeps its base rate as
    `initial_lr`. Raises StageError if nothing is trained."""
    parts = [module] if parts is None else parts
    here = {one for part in parts for one in part.parameters()}
    found = []
    divided = plan.divide(named_parts(module, parts))
    for number, (part, own) in enumerate(zip(plan.parts, divided, strict=True)):
        groups = []
        for group in groups_of(part, own) if own else ():
            by_mesh = defaultdict(list)  # torch updates a group's parameters together
            for one in group["params"]:
                if one in here:
                    by_mesh[getattr(one, "device_mesh", None)].append(one)
            groups += [{**group, "params": same} for same in by_mesh.values()]
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
        if (times := taken[id(one.parameter)]) != 1:
            rule = part.name or part.algorithm
            raise StageError(f"{rule} has {one.name} in {times} groups, not in one")
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
