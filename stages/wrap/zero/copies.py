"""What offloading moves between a device, its host and a disk, by DeepSpeed's source.

A copy from a device to its host travels in the dtype that it has on the device, one the other way
in the dtype that it will have there: torch casts on the host.
"""

from __future__ import annotations

from pipeline.forecast.placement import Copies
from stages.wrap.zero.memory import ACCUMULATED, Setting, Weights, gathers, in_part


def copies(setting: Setting, weights: Weights, microbatches: int) -> Copies:
    """Of a rank in an optimizer step of so many micro-batches."""
    if setting.stage.stage < 3:
        return _replicated(setting, weights, microbatches)
    return _sharded(setting, weights, microbatches)


def _replicated(setting: Setting, weights: Weights, microbatches: int) -> Copies:
    """Summed gradients go down once a step, updated weights up (copy_grads_in_partition)."""
    if setting.stage.offload_optimizer is None:
        return Copies()
    part, c = setting.share(sum(weights.trained)), setting.compute_bytes
    up, down = c * part, setting.master_bytes * part
    if c == ACCUMULATED and microbatches > 1:
        # Gradients are summed in host memory: whole ones of parameters of which there is a part.
        whole, reductions = c * in_part(weights, part), _reductions(setting, microbatches)
        down += whole * reductions
        up += whole * max(reductions - 1, 1)
    return Copies(up=up, down=down)


def _reductions(setting: Setting, microbatches: int) -> int:
    """Stage 1 reduces in the step."""
    return microbatches if setting.stage.stage > 1 else 1


def _sharded(setting: Setting, weights: Weights, microbatches: int) -> Copies:
    """Stage 3."""
    c, m = setting.compute_bytes, setting.master_bytes
    params, optimizer = setting.stage.offload_param, setting.stage.offload_optimizer
    part, frozen = setting.shares(weights.trained), setting.shares(weights.frozen)
    up = down = disk = 0
    if optimizer is not None:
        # partition_grads: summed on the device all the same, each micro-batch there and back.
        up += ACCUMULATED * part * microbatches
        down += (ACCUMULATED * microbatches + m) * part
    if optimizer is not None and optimizer.device == "nvme":
        # Masters, their gradients and moments are read and written.
        disk += 2 * part * (2 * m + setting.moment_bytes)
    if params is not None:
        read = c * gathers(setting, weights, microbatches) // setting.world
        up += read
        down += 0 if optimizer is not None else m * part
        near = min(part, params.max_in_cpu) if params.device == "nvme" else part + frozen
        far = part + frozen - near
        disk += read * far // (part + frozen) + c * (part - min(part, near))
    elif optimizer is not None:
        up += c * part
    return Copies(up=up, down=down, disk=disk)
