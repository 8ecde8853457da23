"""How parameters come to life under ZeRO: whole on each rank, or partitioned from the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipeline.artifacts import ModelSource, Precision
from pipeline.dist import Dist
from stages.wrap.birth import build_empty, materialise


def replicated(model: ModelSource, precision: Precision, dist: Dist) -> nn.Module:
    """Stages 1 and 2: every rank has memory for all parameters, not yet filled."""
    module = build_empty(model, precision)
    materialise(module, dist.device, buffer_device=dist.device)
    return module


def partitioned(
    model: ModelSource, precision: Precision, dist: Dist, config: Mapping[str, Any]
) -> nn.Module:
    """Stage 3: each parameter is partitioned as soon as it exists, not yet filled.

    No process holds more of the model than its part and one whole tensor.
    """
    import deepspeed

    declared = build_empty(model, precision)
    with deepspeed.zero.Init(config_dict_or_path=dict(config)):
        module = model.build()
    model.tie(module)
    for owner in model.reaching(module):
        for parameter in owner.parameters():
            deepspeed.zero.register_external_parameter(owner, parameter)
    for block in model.compiled(module):
        # Gathered as a whole, without hooks within, which would break its graph. Frozen parameters
        # are not there in backward then: with an adapter the hooks stay.
        if all(parameter.requires_grad for parameter in block.parameters()):
            deepspeed.utils.set_z3_leaf_module(block, True)
    module.train()
    _redeclare_buffers(module, declared, dist.device)
    return module


def _redeclare_buffers(module: nn.Module, declared: nn.Module, device: torch.device) -> None:
    """Give `module` the buffers of `declared`: zero.Init computes buffers in the parameters' dtype,
    which is too coarse for rotary frequencies."""
    for name, buffer in declared.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = buffer.to(device)
