"""How parameters come to life under ZeRO: whole on each rank, or partitioned from the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.artifacts import ModelSource, Precision, TensorReader
from pipeline.dist import Dist
from pipeline.errors import StageError
from pipeline.stage import Context
from stages.wrap import birth
from stages.wrap.zero import compat
from stages.wrap.zero.partitions import own_part, partitions


def replicated(model: ModelSource, precision: Precision, dist: Dist) -> nn.Module:
    """Stages 1 and 2: every rank holds all parameters."""
    module = birth.build_empty(model, precision)
    birth.materialise(module, dist.device, buffer_device=dist.device)
    birth.fill(module, model, dist, lambda target, value: target.copy_(value))
    return module


def partitioned(
    model: ModelSource, precision: Precision, dist: Dist, config: Mapping[str, Any]
) -> nn.Module:
    """Stage 3: each parameter is partitioned as soon as it exists, then filled one at a time.

    No process holds more of the model than its part and one whole tensor.
    """
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=dict(config)):
        module = model.build()
    model.tie(module)
    module.train()
    _redeclare_buffers(module, birth.build_empty(model, precision), dist.device)
    with birth.source_reader(model, dist) as reader, torch.no_grad():
        for name, target in birth.stored_tensors(module):
            _fill_one(name, target, reader, dist)
    return module


def _redeclare_buffers(module: nn.Module, declared: nn.Module, device: torch.device) -> None:
    """Give `module` the buffers of `declared`: zero.Init computes buffers in the parameters' dtype,
    which is too coarse for rotary frequencies."""
    for name, buffer in declared.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = buffer.to(device)


def _fill_one(name: str, target: Tensor, reader: TensorReader | None, dist: Dist) -> None:
    import deepspeed

    if not hasattr(target, "ds_shape"):
        if reader is not None:
            _copy(name, target, reader)
        if dist.world_size > 1:
            torch.distributed.broadcast(target, src=0)
        return
    with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
        if reader is not None:
            _copy(name, target.data, reader)


def _copy(name: str, target: Tensor, reader: TensorReader) -> None:
    value = reader.read(name)
    if value.shape != target.shape:
        raise StageError(
            f"{name}: the source has shape {tuple(value.shape)}, "
            f"the model expects {tuple(target.shape)}"
        )
    target.copy_(value)


def refine_masters(live: Any, model: ModelSource, ctx: Context) -> None:
    """Give masters the source's full precision where the compute dtype has rounded it off.

    DeepSpeed makes masters out of the parameters it is handed, which are already in the compute
    dtype. Reads the source a second time; sends only tensors that the rounding changed (none, for a
    source stored in the compute dtype). Skipped with masters on disk, where each write would swap.
    """
    if compat.swaps_masters(live.optimizer):
        ctx.log.info("master weights start from the compute dtype (they are on disk)")
        return
    owned = partitions(live.optimizer)
    parts = {part.parameter: (flat, part) for flat in owned.flats() for part in flat.parts}
    with birth.source_reader(model, ctx.dist) as reader, torch.no_grad():
        for name, parameter in live.module.named_parameters():
            value = _rounded_off(name, parameter, reader, ctx.dist)
            if value is None or parameter not in parts:
                continue
            flat, part = parts[parameter]
            mine = value.flatten()[part.start : part.start + part.length]
            own_part(owned.master(flat), part).copy_(mine)


def _rounded_off(
    name: str, parameter: nn.Parameter, reader: TensorReader | None, dist: Dist
) -> Tensor | None:
    """The source's full fp32 value, on every rank; None where the parameter holds it exactly."""
    if not parameter.requires_grad:
        return None
    shape = getattr(parameter, "ds_shape", parameter.shape)
    value = torch.empty(shape, dtype=torch.float32, device=dist.device)
    rounded = torch.zeros((), dtype=torch.int32, device=dist.device)
    if reader is not None:
        value.copy_(reader.read(name))
        rounded.fill_(not torch.equal(value, value.to(parameter.dtype).float()))
    if dist.world_size > 1:
        torch.distributed.broadcast(rounded, src=0)
    if not rounded.item():
        return None
    if dist.world_size > 1:
        torch.distributed.broadcast(value, src=0)
    return value
