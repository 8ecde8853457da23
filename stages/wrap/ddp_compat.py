"""What is private or differs between torch versions about DistributedDataParallel, in one place."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def no_buffer_sync() -> dict[str, Any]:
    """Arguments that keep buffers from being broadcast at every forward.

    They are the same everywhere from birth, and no causal language model updates one in forward.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    # torch 2.13 renamed the argument and deprecates the old name.
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def hook_states(model: DistributedDataParallel) -> list[object]:
    """What the registered communication hooks were registered with."""
    return [state for _, state in model._comm_hooks]
