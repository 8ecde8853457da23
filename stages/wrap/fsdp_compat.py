"""What torch keeps private about fully_shard, in one place; a contract test guards it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from pipeline.artifacts import dtype_name


def sharding_facts(model: nn.Module) -> dict[str, Any]:
    """Units, dtypes and resharding as torch's own state objects hold them.

    `reshard_after_forward` is that of the units below the root.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in _groups(module)]
    below = [group for module in modules if module is not model for group in _groups(module)]
    return {
        "units": len(modules),
        "reshard_after_forward": sorted({g.post_forward_mesh_info is not None for g in below})
        or [False],
        "compute": sorted({dtype_name(g.mp_policy.param_dtype) for g in groups}),
        "reduce": sorted({dtype_name(g.mp_policy.reduce_dtype) for g in groups}),
        "cpu_offload": all(isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups),
    }


def reshard(model: nn.Module) -> None:
    """Give up what is gathered: after a forward pass without backward (evaluation), units may still
    be whole."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def _groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one group a module before torch 2.12
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]
