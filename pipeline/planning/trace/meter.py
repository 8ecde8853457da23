"""Meter the memory of tensors while a program runs: who holds how much, and the peak of every
moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.fake_tensors import has_values
from pipeline.planning.timeline import LOAD, Held
from pipeline.planning.trace.torch_compat import (
    Watcher,
    adds_gradients,
    asks_for_number,
    local,
    storage_key,
    tensors_in,
)

REST = "activations and temporaries"
"""Item of what has no owner."""

Unit = int | str
Moment = tuple[str, int, Unit]
"""Phase, how often it was entered before, and the part of the model that is running."""

Resize = Any


class Meter(Watcher):  # type: ignore[no-untyped-call]
    """Inside, every storage that an operation makes counts until it is freed or resized.

    Tensors on the meta device have no memory. With `fake`, neither have those with values, and
    where the program asks for a number, it gets one.
    """

    def __init__(self, *, fake: bool) -> None:
        super().__init__()
        self.now = 0
        self.moments: dict[Moment, Held] = {}
        self._fake = fake
        self._sizes: dict[int, int] = {}
        self._items: dict[int, str] = {}
        self._held: dict[str, int] = {}
        self._moment: Moment = (LOAD, 0, "")
        self._top = -1
        self._at_top: dict[str, int] = {}

    def enter(self, moment: Moment) -> None:
        """A moment ends, and another one begins."""
        self.leave()
        self._moment = moment
        self._top = -1
        self._count()

    def leave(self) -> None:
        """Note the peak of the moment that ends. One that comes again has its highest peak."""
        known = self.moments.get(self._moment)
        if self._top >= 0 and (known is None or known.bytes < self._top):
            items = {item: size for item, size in self._at_top.items() if size}
            self.moments[self._moment] = Held(bytes=self._top, items=items)

    def own(self, item: str, tensors: Iterable[Tensor], *, replace: bool = True) -> None:
        """The memory of these tensors is an item; without `replace`, unless it is one already."""
        for tensor in tensors:
            key = storage_key(local(tensor).untyped_storage())
            size = self._sizes.get(key)
            if size is None or not (replace or self._items[key] == REST):
                continue
            self._held[self._items[key]] -= size
            self._held[item] = self._held.get(item, 0) + size
            self._items[key] = item

    def __enter__(self) -> Meter:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing()  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self.leave()

    def operation(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Do the operation, but add gradients as they are added unwatched, and know numbers."""
        if self._fake and asks_for_number(function):
            return 1.0
        if adds_gradients(function, arguments):
            return arguments[0].add_(arguments[1])
        out = function(*arguments, **named)
        # Its memory is its argument's, which may be none's that counts.
        if function is not torch.ops.aten.detach.default:
            for tensor in tensors_in(out):
                self._add(tensor)
        return out

    def _add(self, tensor: Tensor) -> None:
        here = local(tensor)
        if here.device.type == "meta" or (self._fake and has_values(here)):
            return
        storage = here.untyped_storage()
        key = storage_key(storage)
        if key not in self._sizes:
            self._sizes[key], self._items[key] = 0, REST
            weakref.finalize(storage, self._free, key)
            self._change(key, storage.nbytes())

    def _change(self, key: int, size: int) -> None:
        more = size - self._sizes[key]
        item = self._items[key]
        self._sizes[key] = size
        self._held[item] = self._held.get(item, 0) + more
        self.now += more
        self._count()

    def _count(self) -> None:
        if self.now > self._top:
            self._top, self._at_top = self.now, dict(self._held)

    def _free(self, key: int) -> None:
        self._change(key, 0)
        del self._sizes[key], self._items[key]

    def _resizing(self) -> Resize:
        original = self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            done = original(storage, size)
            key = storage_key(storage)
            if key in self._sizes:
                self._change(key, size)
            return done

        return resize_
