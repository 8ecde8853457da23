"""Names of transformers that divide a mixture of experts among ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

DISPATCHED = "ep_dispatch_experts"
"""Style of a module whose tokens go to their experts' ranks."""
METHOD = "all_to_all"
"""transformers' way of sending tokens that works with gradients and with a batch a rank."""


def plan_of(model: Any) -> dict[str, str]:
    """Name of each module and parameter that the architecture's plan divides by experts -> its
    style; empty for an architecture without a plan."""
    plan = getattr(model, "ep_plan", None) or {}
    found: dict[str, str] = model._expand_parallel_plan(plan) if plan else {}
    return found


def divide(model: nn.Module, plan: dict[str, str], experts: DeviceMesh, tensor: DeviceMesh) -> None:
    """Divide `model`, on the meta device, over the one axis `experts`, in place. `tensor` has the
    ranks that have the same tokens. Raises ValueError if the experts do not divide."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    apply_expert_parallelism(model, experts, tensor, plan, METHOD)


def divide_updates(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the updates of an experts' module, which are in modules inside of it, by experts, and
    let its forward find local tensors there."""
    inside = [one for one in experts.modules() if one is not experts]
    places = [(module, name) for module in inside for name in module._parameters]
    for module, name in places:
        if (weight := module._parameters[name]) is not None:
            own = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[name] = nn.Parameter(own, requires_grad=weight.requires_grad)
    forward = experts.forward

    def replaced(*args: Any, **kwargs: Any) -> Any:
        whole: list[tuple[nn.Module, str, Any]] = [
            (module, name, one)
            for module, name in places
            if isinstance(one := module._parameters[name], DTensor)
        ]
        for module, name, one in whole:
            module._parameters[name] = one.to_local()
        try:
            return forward(*args, **kwargs)
        finally:
            for module, name, one in whole:
                module._parameters[name] = one

    if places:
        experts.forward = replaced


@contextlib.contextmanager
def balanced_routing() -> Iterator[None]:
    """Have every rank send equal numbers of tokens to all others, in the body, where tensors
    without values do not say how many there are."""
    from torch._subclasses.fake_tensor import FakeTensor

    try:
        from transformers.distributed.expert_parallel import AllToAllEP
    except ImportError:  # of a version that divides no experts
        yield
        return

    dispatch, listed = AllToAllEP._dispatch_tokens, FakeTensor.tolist

    def balanced(self: Any, hidden: Any, index: Any, weights: Any) -> Any:
        pairs, ranks = index.numel(), self.ep_mesh.size()
        shares = [pairs // ranks + (rank < pairs % ranks) for rank in range(ranks)]
        FakeTensor.tolist = lambda tensor: [shares, shares]  # type: ignore[method-assign, assignment]
        try:
            return dispatch(self, hidden, index, weights)
        finally:
            FakeTensor.tolist = listed  # type: ignore[method-assign]

    AllToAllEP._dispatch_tokens = balanced
    try:
        yield
    finally:
        AllToAllEP._dispatch_tokens = dispatch
