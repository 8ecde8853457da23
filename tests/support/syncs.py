"""Operations for which a host waits for a device, counted on a CPU too."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
OPERATORS = {
    aten._local_scalar_dense.default,  # item, bool, int, float, and indices that are tensors
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,  # unless its size is given
    aten.bincount.default,
}
"""Operators whose result, or its size, is known by the values of tensors alone."""
METHODS: set[Callable[..., Any]] = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
"""Methods that read the memory of a tensor on the CPU without an operator."""


class _Operators(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in OPERATORS or _takes_a_mask(func, *args):
            self._note(str(func))
        return func(*args, **(kwargs or {}))


def _takes_a_mask(func: Any, *args: Any) -> bool:
    """Whether a tensor is indexed by a mask, whose number of elements has to be known; to write one
    value there needs no number."""
    if func.overloadpacket not in (aten.index, aten.index_put, aten.index_put_):
        return False
    masked = any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return masked and (func.overloadpacket is aten.index or args[2].numel() > 1)


class _Methods(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in METHODS:
            self._note(func.__name__)
        return func(*args, **(kwargs or {}))


class Syncs:
    """Counts, in its body, what this thread and its backward passes wait for."""

    def __init__(self) -> None:
        self.found: list[str] = []
        """Each operation, and the place in the code that asked for it."""
        self._modes = [_Methods(self._note), _Operators(self._note)]

    def __enter__(self) -> list[str]:
        for mode in self._modes:
            mode.__enter__()
        return self.found

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def _note(self, what: str) -> None:
        frames = [
            f"{frame.filename}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if "/torch/" not in frame.filename and frame.filename != __file__
        ]
        self.found.append(f"{what} at {' < '.join(frames[:-6:-1])}")
