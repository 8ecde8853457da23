"""Track the memory of a program while it runs, what it computes, and where in a model it is."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pipeline.planning.forecast import LOAD
from pipeline.planning.trace import torch_compat
from pipeline.planning.trace.torch_compat import Link, storage_key, tensors_in
from pipeline.utils.tensors import device_of, has_values

aten = torch.ops.aten
ATTENTION, PRODUCTS = "attention", "products"
CPU_KERNELS: dict[Any, tuple[Any, int, float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (sdpa_flop_count, 3, 1.0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        sdpa_backward_flop_count, 4, 4 / 5,
    ),
}  # fmt: skip
"""Kernel -> formula, the number of tensors whose shapes it takes, and the share that counts: of an
attention kernel's backward, without the products that repeat forward."""
Part = int | str
START, HEAD, LOSS, INPUT = "start", "head", "loss", "input"
"""Parts of a model that are not block. In forward: before the first block, after the last, after
the model. In backward: before everything, after the loss (HEAD), after all blocks (INPUT)."""


class Level(NamedTuple):
    """Bytes in use at a time; the host's are activations that wait there for backward."""

    device: int
    host: int


@dataclass(kw_only=True)
class Stretch:
    """A program while one part of the model runs in a phase. given: name of the weight whose
    gradient begins it; else empty. levels: at its beginning and at each change of memory. work:
    `products`, `attention`, `again`: floating-point operations of matrix products, of attention
    kernels, and of both when recomputed; `made`: bytes of new tensors; bytes that ranks exchange by
    link. repeats: whether anything is recomputed."""

    phase: str
    part: Part
    given: str = ""
    levels: list[Level] = field(default_factory=list)
    work: defaultdict[str | Link, float] = field(default_factory=lambda: defaultdict(float))
    repeats: bool = False


class MemoryTracker(torch_compat.Watcher):  # type: ignore[no-untyped-call]
    """Inside, count every storage that an operation makes until it is freed. Tensors on the meta
    device have no memory. With `fake`, those with values have none either, and numbers are 1."""

    def __init__(self, *, fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._sizes: dict[int, int] = {}
        self._ran: dict[Any, tuple[Any, dict[str | Link, float]]] = {}
        self._on_host: set[int] = set()
        self._now = self._host = 0
        self._region: dict[int, int] | None = None
        """Bytes of storages that the running compiled code has made and no one has counted."""
        self.stretches: list[Stretch] = []
        self.enter(LOAD)

    def enter(self, phase: str, part: Part = "", given: str = "") -> None:
        self.stretches.append(Stretch(phase=phase, part=part, given=given))
        self._record()

    def _record(self) -> None:
        self.stretches[-1].levels.append(Level(self._now - self._host, self._host))

    def once(self, key: Any, function: Callable[[], Any]) -> Any:
        """Run a function, or count and return what the key had in this stretch."""
        work, key = self.stretches[-1].work, (len(self.stretches), key)
        if key not in self._ran:
            before = work.copy()
            result = function()
            self._ran[key] = result, {what: work[what] - before[what] for what in [*work]}
            return result
        result, more = self._ran[key]
        for what, amount in more.items():
            work[what] += amount
        return result

    def move_to_host(self, tensor: Tensor) -> None:
        """Count a tensor's memory as the host's."""
        key = storage_key(tensor.untyped_storage())
        if key in self._sizes and key not in self._on_host:
            self._on_host.add(key)
            self._host += self._sizes[key]
            self._record()

    @contextlib.contextmanager
    def fused(self, again: bool) -> Iterator[None]:
        """Count what the body makes as what fused kernels write."""
        outer, self._region = self._region, {}
        self.stretches[-1].repeats |= again
        try:
            yield
            left = (size for key, size in self._region.items() if self._sizes.get(key))
            self.stretches[-1].work["made"] += sum(left)
        finally:
            self._region = outer

    def operation(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run an operation on tensors, and count what it makes and computes."""
        before = self._now
        out = self._run(function, arguments, named)
        here, again = self.stretches[-1], torch.is_grad_enabled() and torch_compat.in_backward()
        exchanged = torch_compat.collective(function, arguments)
        if exchanged is not None:
            here.work[exchanged[0]] += exchanged[1]
        kind, amount = operations(function, arguments, named, out)
        here.repeats |= again
        here.work["again" if again else kind] += amount
        new = max(self._now - before, 0)
        if self._region is None:
            here.work["made"] += new
            return out
        # Of fused code, only products write, and what products read is written.
        made = [*self._storages(out)]
        self._region |= {key: self._sizes[key] for key in made if key in self._sizes and new}
        read = [*made, *self._storages((arguments, named))] if amount else ()
        here.work["made"] += sum(self._region.pop(key, 0) for key in read)
        return out

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
                    storage = tensor.untyped_storage()
                    key = storage_key(storage)
                    if key not in self._sizes:
                        self._sizes[key] = 0
                        weakref.finalize(storage, self._free, key)
                        self._change(key, storage.nbytes())
        return out

    def _change(self, key: int, size: int) -> None:
        more = size - self._sizes[key]
        self._sizes[key] = size
        self._now += more
        self._host += more if key in self._on_host else 0
        self._record()

    def _free(self, key: int) -> None:
        self._change(key, 0)
        del self._sizes[key]
        self._on_host.discard(key)


@contextlib.contextmanager
def offloading(tracker: MemoryTracker, device: str) -> Iterator[None]:
    """Inside, activations that checkpointing moves to the host count as the host's, unless the host
    is the device. On CPUs, where a trace runs, torch would move nothing."""
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


def operations(
    function: Any, arguments: Sequence[Any], named: Mapping[str, Any], out: Any
) -> tuple[str, float]:
    """ATTENTION for fused kernels, else PRODUCTS, with the floating-point operations of the
    function: half where attention is causal, none for anything but products of matrices."""
    packet = function._overloadpacket
    if packet in CPU_KERNELS:
        formula, tensors, share = CPU_KERNELS[packet]
        names = [argument.name for argument in function._schema.arguments]
        causal = (dict(zip(names, arguments, strict=False)) | dict(named)).get("is_causal")
        # Of (samples, heads, tokens, size), as many heads of keys and values as of queries, which
        # come first: the work is the same, and torch 2.11 counts no other.
        shapes = [one.shape for one in arguments[:tensors]]
        amount = formula(*(torch.Size((one[0], shapes[0][1], *one[2:])) for one in shapes))
        return ATTENTION, amount * share * (0.5 if causal else 1.0)
    if packet is aten._grouped_mm:
        # Each row of the first is multiplied with its group's matrix; or gradients of that.
        return PRODUCTS, 2.0 * math.prod(arguments[0].shape) * arguments[1].shape[-1]
    counted = flop_registry.get(packet)
    amount = 0.0 if counted is None else float(counted(*arguments, **named, out_val=out))
    return (ATTENTION if counted and "attention" in str(packet) else PRODUCTS), amount
