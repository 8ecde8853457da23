"""Compiled code in a trace: cut into forward and backward as inductor cuts it, run operation by
operation, and counted as fused kernels, which write only what a product reads or what is left.

`torch.compile(..., backend=BACKEND)` gives such code, once `register` was called.
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


_active: list[Callable[[], contextlib.AbstractContextManager[None]]] = []


@contextlib.contextmanager
def counted_by(region: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, run each piece of compiled code within `region()`."""
    _active.append(region)
    try:
        yield
    finally:
        _active.pop()


@functools.cache
def register() -> None:
    """Make BACKEND known to torch."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._dynamo.backends.registry import register_backend

    def compiler(graph: Any, inputs: Any) -> Any:
        code = boxed_nop(graph, inputs)

        def run(arguments: list[Any]) -> Any:
            with _active[-1]() if _active else contextlib.nullcontext():
                return code(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        return aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            decompositions=lambda: import_module(
                "torch._inductor.compile_fx"
            ).select_decomp_table(),
            partition_fn=functools.partial(
                min_cut_rematerialization_partition, compiler="inductor"
            ),
        )(graph, inputs)

    register_backend(name=BACKEND, compiler_fn=backend)  # type: ignore[arg-type]
