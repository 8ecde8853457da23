"""What offloading moves between a device, its host and a disk, by DeepSpeed's source.

A copy from a device to its host travels in the dtype that it has on the device, one the other way
in the dtype that it will have there: torch casts on the host.
"""

from __future__ import annotations

from pipeline.planning.strategy import Copies
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
        whole, reductions = c * in_part(weights.trained, part), _reductions(setting, microbatches)
        down += whole * reductions
        up += whole * max(reductions - 1, 1)
    return Copies(up=up, down=down)


def _reductions(setting: Setting, microbatches: int) -> int:
    """Stage 1 reduces in the step."""
    return microbatches if setting.stage.stage > 1 else 1


def _sharded(setting: Setting, weights: Weights, microbatches: int) -> Copies:
    """Stage 3."""
    gradients = _gradients(setting, weights, microbatches)
    return gradients + _parameters(setting, weights, microbatches)


def _gradients(setting: Setting, weights: Weights, microbatches: int) -> Copies:
    """Those in host memory are summed on the device, each micro-batch there and back; then they go
    down to the masters (partition_grads)."""
    offload = setting.stage.offload_optimizer
    if offload is None:
        return Copies()
    part, m = setting.shares(weights.trained), setting.master_bytes
    # Masters, their gradients and moments are read and written.
    disk = 2 * part * (2 * m + setting.moment_bytes) if offload.device == "nvme" else 0
    return Copies(
        up=ACCUMULATED * part * microbatches,
        down=(ACCUMULATED * microbatches + m) * part,
        disk=disk,
    )


def _parameters(setting: Setting, weights: Weights, microbatches: int) -> Copies:
    """Read whenever they are gathered, and updated once."""
    params, on_host = setting.stage.offload_param, setting.stage.offload_optimizer is not None
    part, c = setting.shares(weights.trained), setting.compute_bytes
    if params is None:
        return Copies(up=c * part if on_host else 0)
    read, disk = c * gathers(setting, weights, microbatches) // setting.world, 0
    if params.device == "nvme":
        every = part + setting.shares(weights.frozen)
        near = min(part, params.max_in_cpu)
        disk = read * (every - near) // every + c * (part - near)
    return Copies(up=read, down=0 if on_host else setting.master_bytes * part, disk=disk)
