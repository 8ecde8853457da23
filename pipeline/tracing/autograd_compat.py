"""How torch's autograd engine adds gradients of one tensor: in place where nobody else has the
first, unless somebody watches its operations, as a meter does. A contract test guards it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALONE = 4, 2
"""How often a gradient and its storage are referred to when a watcher sees them added, if only the
engine has them."""


def adds_gradients(function: Any, args: Any) -> bool:
    """Whether this is the engine's addition, which unwatched would change its first argument."""
    if function is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
        return False
    if torch._C._current_graph_task_id() == -1:
        return False
    first, second = args
    if not isinstance(second, Tensor) or (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    storage = first.untyped_storage()
    return (first._use_count(), torch._C._storage_Use_Count(storage._cdata)) == ALONE
