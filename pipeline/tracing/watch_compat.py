"""What torch keeps private about operations and the memory of what they give, for those that watch
them; a contract test guards it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `operation` stands for every operation on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.operation(function, args, kwargs or {})

    def operation(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Do it, and give what it gives."""
        return function(*arguments, **named)


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Those in what an operation gives, which may be nested."""
    return (one for one in tree_iter(given) if isinstance(one, Tensor))


def asks_for_number(function: Any) -> bool:
    """Whether the operation is `Tensor.item()`, or what goes by it (`bool`, `float`)."""
    return function is torch.ops.aten._local_scalar_dense.default


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same for every object that stands for one storage."""
    key: int = storage._cdata
    return key


def local(tensor: Tensor) -> Tensor:
    """What this process holds of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
