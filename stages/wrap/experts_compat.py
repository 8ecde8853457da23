"""Expert parallelism, by transformers: ranks hold different experts, and send each other tokens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pipeline import StageError
from stages.wrap.build import replace_parameters
from stages.wrap.tensor_divide import local_value, use_local_values
from stages.wrap.types_compat import refuse_type

DISPATCHED = "ep_dispatch_experts"
"""Style of a module whose tokens go to their experts' ranks."""
METHOD = "all_to_all"
"""transformers' way of sending tokens that works with gradients and with a batch a rank."""


def divide_experts(model: Any, mesh: DeviceMesh, tensor: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of `model`, whose parameters are on the meta device, over the one axis
    `mesh`, in place; returns the modules that hold them. `tensor` has the ranks of the same tokens.
    Every rank holds an equal share of the experts. It sends each token to the ranks of its experts
    and gets their results back, so an expert's gradient is of the tokens of all ranks of `mesh`.
    Raises StageError for a model without a plan of experts, for experts that do not divide, and for
    parameters that ranks with different experts would share: their gradients would count once for
    each of these ranks."""
    refuse_type("expert_parallel", model.config)
    stated = getattr(model, "ep_plan", None)
    plan = model._expand_parallel_plan(stated) if stated else {}
    if not plan:
        raise StageError(f"expert_parallel: {type(model).__name__} has no experts that divide")
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    try:
        apply_expert_parallelism(model, mesh, tensor, plan, METHOD)
    except ValueError as error:
        raise StageError(f"expert_parallel: {error}") from error
    modules = dict(model.named_modules())
    found = [modules[name] for name, style in plan.items() if style == DISPATCHED]
    for experts in found:
        # Updates, in modules inside, are divided too, and forward finds their local tensors.
        inside = [one for one in experts.modules() if one is not experts]
        for module in experts.children():
            replace_parameters(
                module, lambda _, one: distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None)
            )
        values = {
            one: {
                name: functools.partial(local_value, one, name)
                for name, weight in one._parameters.items()
                if weight is not None
            }
            for one in inside
        }
        if inside:
            use_local_values(experts, values, inside)
        for name, parameter in experts.named_parameters():
            places = parameter.placements if isinstance(parameter, DTensor) else ()
            if not any(place.is_shard() for place in places):
                raise StageError(
                    f"expert_parallel: {name} of {type(experts).__name__} is not divided with the "
                    "experts",
                    hint="leave out expert_parallel for this model",
                )
    return found


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
