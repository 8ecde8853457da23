"""A backend of torch's compiler for traces: code is cut into forward and backward as inductor cuts
it, and run operation by operation; private names of torch.

`torch.compile(..., backend=traced_backend())` returns such code. It is counted as fused kernels,
which write only what a product reads, or what is left at the end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

BACKEND, INDUCTOR = "pipetrain_traced", "torch._inductor.compile_fx"
COUNTING: list[Callable[[bool], contextlib.AbstractContextManager[None]]] = []
"""Functions that count a piece of compiled code in their body, as the last one does. They take
whether it recomputes what activation checkpointing did not keep."""


@functools.cache
def traced_backend() -> str:
    """The backend's name, which torch knows from then on."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._dynamo.backends.registry import register_backend
    from torch._functorch.partitioners import min_cut_rematerialization_partition, must_recompute

    def compiler(graph: Any, inputs: Any, *, backward: bool = False) -> Any:
        code = boxed_nop(graph, inputs)
        again = backward and any(map(must_recompute, graph.graph.nodes))

        def run(arguments: list[Any]) -> Any:
            with COUNTING[-1](again) if COUNTING else contextlib.nullcontext():
                return code(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        cut = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
        made = aot_autograd(
            fw_compiler=compiler, bw_compiler=functools.partial(compiler, backward=True),
            decompositions=lambda: import_module(INDUCTOR).select_decomp_table(), partition_fn=cut,
        )  # fmt: skip
        return made(graph, inputs)

    register_backend(name=BACKEND, compiler_fn=backend)
    return BACKEND
