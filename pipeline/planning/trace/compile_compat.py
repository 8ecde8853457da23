"""A backend of torch's compiler for traces: code is cut into forward and backward as inductor cuts
it, and run operation by operation; private names of torch.

`torch.compile(..., backend=traced_backend())` gives such code. It is counted as fused kernels,
which write only what a product reads, or what is left at the end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

BACKEND = "pipetrain_traced"


@dataclass
class Region:
    """Code that is compiled as one. sizes: storages that it has made so far, and their bytes, those
    left out that were counted."""

    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, storages: Iterable[tuple[int, int]]) -> None:
        """Note new storages, as key and bytes."""
        self.sizes.update(storages)

    def written(self, keys: Iterable[int]) -> int:
        """Return the bytes of those of some storages that are written to memory, counted once."""
        return sum(self.sizes.pop(key, 0) for key in keys)


Count = Callable[[bool], contextlib.AbstractContextManager[None]]
"""Takes whether a piece of compiled code recomputes what activation checkpointing did not keep, and
counts the piece in its body."""
_active: list[Count] = []


@contextlib.contextmanager
def region(*, again: bool) -> Iterator[None]:
    """Run a piece of compiled code in the body, as the innermost `counted_by` says; `again`
    where it recomputes."""
    with _active[-1](again) if _active else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def counted_by(count: Count) -> Iterator[None]:
    """Inside, run each piece of compiled code within `count(again)`."""
    _active.append(count)
    try:
        yield
    finally:
        _active.pop()


@functools.cache
def traced_backend() -> str:
    """The backend's name, which torch knows from then on."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._dynamo.backends.registry import register_backend
    from torch._functorch.partitioners import min_cut_rematerialization_partition, must_recompute

    def compiler(graph: Any, inputs: Any, *, again: bool = False) -> Any:
        code = boxed_nop(graph, inputs)

        def run(arguments: list[Any]) -> Any:
            with region(again=again):
                return code(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backward_compiler(graph: Any, inputs: Any) -> Any:
        return compiler(graph, inputs, again=any(map(must_recompute, graph.graph.nodes)))

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        return aot_autograd(
            fw_compiler=compiler,
            bw_compiler=backward_compiler,
            decompositions=lambda: import_module(
                "torch._inductor.compile_fx"
            ).select_decomp_table(),
            partition_fn=functools.partial(
                min_cut_rematerialization_partition, compiler="inductor"
            ),
        )(graph, inputs)

    register_backend(name=BACKEND, compiler_fn=backend)
    return BACKEND
