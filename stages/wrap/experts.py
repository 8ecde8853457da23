"""Expert parallelism: ranks hold different experts, and send each other tokens."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pipeline import StageError
from stages.wrap import experts_compat as compat
from stages.wrap.types_compat import refuse_type


def divide_experts(model: Any, mesh: DeviceMesh, tensor: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of `model`, whose parameters are on the meta device, over the one axis
    `mesh`, in place; returns the modules that hold them.

    Every rank holds an equal share of the experts. It sends each token to the ranks of its experts
    and gets their results back, so an expert's gradient is of the tokens of all ranks of `mesh`.
    Raises StageError for a model without a plan of experts, for experts that do not divide, and for
    parameters that ranks with different experts would share, as their gradients would count once
    for each of these ranks.
    """
    refuse_type("expert_parallel", model.config)
    plan = compat.plan_of(model)
    if not plan:
        raise StageError(f"expert_parallel: {type(model).__name__} has no experts that divide")
    try:
        compat.divide(model, plan, mesh, tensor)
    except ValueError as error:
        raise StageError(f"expert_parallel: {error}") from error
    modules = dict(model.named_modules())
    found = [modules[name] for name, style in plan.items() if style == compat.DISPATCHED]
    for experts in found:
        compat.divide_updates(experts, mesh)
        for name, parameter in experts.named_parameters():
            places = parameter.placements if isinstance(parameter, DTensor) else ()
            if not any(place.is_shard() for place in places):
                raise StageError(
                    f"expert_parallel: {name} of {type(experts).__name__} is not divided with the "
                    "experts",
                    hint="leave out expert_parallel for this model",
                )
    return found
