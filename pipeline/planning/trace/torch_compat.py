"""Private parts of torch that a trace needs; contract tests guard each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from pipeline.distributed.environment import stay_on_loopback

ALONE = 4, 2
"""References to a gradient and its storage that a watcher sees at its addition, if only the
autograd engine holds them."""


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `operation` stands for every operation on tensors."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.prim.device.default:  # often called, and no operation
            return function(*args)
        return self.operation(function, args, kwargs or {})

    def operation(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run the operation and return its result."""
        return function(*arguments, **named)


def adds_gradients(function: Any, args: Any) -> bool:
    """Whether this is the autograd engine's addition of two gradients of one tensor. Without a
    dispatch mode it happens in place, if nothing else holds the first argument."""
    if function is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
        return False
    if torch._C._current_graph_task_id() == -1:
        return False
    first, second = args
    if not isinstance(second, Tensor) or (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    storage = first.untyped_storage()
    return (first._use_count(), torch._C._storage_Use_Count(storage._cdata)) == ALONE


def computes_again() -> bool:
    """Whether activation checkpointing is recomputing a forward pass during backward."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Tensors in a nested structure."""
    return (one for one in tree_iter(given) if isinstance(one, Tensor))


def cast_in(given: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a nested structure."""
    return tree_map_only(
        Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, given
    )


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that identifies a storage, whose objects in Python differ."""
    return int(storage._cdata)


def local(tensor: Tensor) -> Tensor:
    """The tensor, or this process's shard of a DTensor."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def silent_group(ranks: int) -> AbstractContextManager[None]:
    """Inside, this process is rank 0 of `ranks`; nothing is sent, and every collective completes at
    once. The process group is that of torch's own tests."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return _group("fake", FakeStore(), ranks)


def single_group() -> AbstractContextManager[None]:
    """Inside, this process is a group of its own, which really sends: DistributedDataParallel needs
    the results of its collectives."""
    stay_on_loopback()
    return _group("gloo", dist.HashStore(), 1)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _group(backend: str, store: Any, ranks: int) -> Iterator[None]:
    hook = sys.excepthook  # torch puts the rank in front of what this prints
    dist.init_process_group(backend, store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
