"""Track the memory of a program while it runs, what it computes, and where in a model it is."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.planning.forecast import LOAD
from pipeline.planning.trace import torch_compat
from pipeline.planning.trace.compile_compat import Region, counted_by
from pipeline.planning.trace.operations import ATTENTION, operations
from pipeline.planning.trace.torch_compat import Link, storage_key, tensors_in
from pipeline.utils.fake_tensors import device_of, has_values

aten = torch.ops.aten
Part = int | str
START, HEAD, LOSS, INPUT = "start", "head", "loss", "input"
"""Parts of a model that are no block. In forward: before the first block, after the last, after the
model. In backward: before everything (START), after the loss (HEAD), after all blocks (INPUT)."""


class Position(NamedTuple):
    """Position of a program: its phase, and the part of the model that runs (a block's number or a
    name)."""

    phase: str
    part: Part


class Level(NamedTuple):
    """Bytes in use at a time; the host's are activations that wait there for backward."""

    device: int
    host: int


@dataclass(kw_only=True)
class Stretch:
    """A program from one position to the next. levels: at its beginning and at each change of
    memory. products, attention, again: floating-point operations of matrix products, of attention
    kernels, and of both when recomputed. made: bytes of new tensors. sent: bytes that ranks
    exchange. repeats: whether anything is recomputed."""

    position: Position
    levels: list[Level]
    products: float = 0.0
    attention: float = 0.0
    again: float = 0.0
    made: int = 0
    sent: Counter[Link] = field(default_factory=Counter)
    repeats: bool = False

    def work(self) -> list[Any]:
        """Everything that adds up."""
        return [self.products, self.attention, self.again, self.made, Counter(self.sent)]

    def add(self, work: Sequence[Any]) -> None:
        """Add the difference of two results of `work`."""
        products, attention, again, made, sent = work
        self.products, self.attention = self.products + products, self.attention + attention
        self.again, self.made = self.again + again, self.made + made
        self.sent.update(sent)


class MemoryTracker(torch_compat.Watcher):  # type: ignore[no-untyped-call]
    """Inside, count every storage that an operation makes until it is freed.

    Tensors on the meta device have no memory. With `fake`, tensors with values have none either,
    and a program that asks for a number gets 1.
    """

    def __init__(self, *, fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._sizes: dict[int, int] = {}
        self._ran: dict[Any, tuple[Any, list[Any]]] = {}
        self._on_host: set[int] = set()
        self._now = self._host = 0
        self._region: Region | None = None
        self.stretches: list[Stretch] = []
        self.enter(Position(LOAD, ""))

    def enter(self, position: Position) -> None:
        """Begin a stretch."""
        self.stretches.append(Stretch(position=position, levels=[self._level()]))

    def once(self, key: Any, function: Callable[[], Any]) -> Any:
        """Run a function, or count the work of an earlier one with the same key in the same stretch
        and return its result."""
        here, key = self.stretches[-1], (len(self.stretches), key)
        if key not in self._ran:
            before = here.work()
            result = function()
            self._ran[key] = (
                result,
                [now - then for now, then in zip(here.work(), before, strict=True)],
            )
            return result
        result, work = self._ran[key]
        here.add(work)
        return result

    def move_to_host(self, tensor: Tensor) -> None:
        """Count a tensor's memory as the host's."""
        key = storage_key(tensor.untyped_storage())
        if key in self._sizes and key not in self._on_host:
            self._on_host.add(key)
            self._host += self._sizes[key]
            self.stretches[-1].levels.append(self._level())

    def __enter__(self) -> MemoryTracker:
        self._counting = contextlib.ExitStack()
        self._counting.enter_context(counted_by(self._fused))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._counting.close()

    @contextlib.contextmanager
    def _fused(self, again: bool) -> Iterator[None]:
        """Count what the body makes as what fused kernels write; some of it `again`."""
        outer, self._region = self._region, Region()
        self.stretches[-1].repeats |= again
        try:
            yield
            left = [key for key in self._region.sizes if self._sizes.get(key)]
            self.stretches[-1].made += self._region.written(left)
        finally:
            self._region = outer

    def operation(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run an operation on tensors, and count what it makes and computes."""
        before = self._now
        out = self._run(function, arguments, named)
        here = self.stretches[-1]
        exchanged = torch_compat.collective(function, arguments)
        if exchanged is not None:
            here.sent[exchanged[0]] += exchanged[1]
        kind, amount = operations(function, arguments, named, out)
        here.made += self._written(max(self._now - before, 0), amount, (arguments, named), out)
        if torch_compat.computes_again():
            here.repeats = True
            here.again += amount
        elif kind == ATTENTION:
            here.attention += amount
        else:
            here.products += amount
        return out

    def _written(self, new: int, amount: float, given: Any, out: Any) -> int:
        """Bytes that an operation writes: the `new` ones, but in fused code only those of products,
        and of what products read."""
        if self._region is None:
            return new
        made = [*self._storages(out)]
        self._region.add((key, self._sizes[key]) for key in made if key in self._sizes and new)
        return self._region.written([*made, *self._storages(given)]) if amount else 0

    def _storages(self, nested: Any) -> Iterator[int]:
        for tensor in map(torch_compat.local, tensors_in(nested)):
            if device_of(tensor).type != "meta":
                yield storage_key(tensor.untyped_storage())

    def _run(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        number = function is aten._local_scalar_dense.default  # Tensor.item()
        if self._fake and number and not has_values(arguments[0]):
            return 1.0
        if torch_compat.adds_gradients(function, arguments):
            return arguments[0].add_(arguments[1])
        out = function(*arguments, **named)
        # A detached tensor shares its argument's memory, which may not be counted.
        if function is not aten.detach.default:
            for tensor in map(torch_compat.local, tensors_in(out)):
                if device_of(tensor).type != "meta" and not (self._fake and has_values(tensor)):
                    self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._free, key)
            self._change(key, storage.nbytes())

    def _change(self, key: int, size: int) -> None:
        more = size - self._sizes[key]
        self._sizes[key] = size
        self._now += more
        self._host += more if key in self._on_host else 0
        self.stretches[-1].levels.append(self._level())

    def _free(self, key: int) -> None:
        self._change(key, 0)
        del self._sizes[key]
        self._on_host.discard(key)

    def _level(self) -> Level:
        return Level(self._now - self._host, self._host)


@contextlib.contextmanager
def offloading(tracker: MemoryTracker, device: str) -> Iterator[None]:
    """Inside, activations that checkpointing moves to the host count as the host's, unless the host
    is the device. A trace runs on CPUs, where torch would move nothing."""
    original = torch.autograd.graph.save_on_cpu

    def pack(tensor: Tensor) -> Tensor:
        there = tensor.clone()
        tracker.move_to_host(there)
        return there

    def moved(pin_memory: bool = False, device_type: str = "cuda") -> Any:
        return torch.autograd.graph.saved_tensors_hooks(pack, torch.clone)

    if device != "cpu":
        torch.autograd.graph.save_on_cpu = moved  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.autograd.graph.save_on_cpu = original  # type: ignore[misc]
