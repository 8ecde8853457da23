"""Private parts of torch that a trace needs; contract tests guard each.

`torch.compile(..., backend=traced_backend())` returns code that is cut into forward and backward as
inductor cuts it, and run operation by operation. It is counted as fused kernels, which write only
what a product reads, or what is left at the end."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._prims import rng_prims
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter, tree_map_only

from pipeline.planning.forecast import Collective

ALONE = 4, 2
"""References to a gradient and its storage at its addition, if only autograd holds them."""
COLLECTIVES: dict[str, Collective] = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}
"""Operators of torch's two families of collectives that a model may call."""
BACKEND, INDUCTOR = "pipetrain_traced", "torch._inductor.compile_fx"


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `operation` stands for every operation on tensors, in compiled code too, a piece of
    which `fused` surrounds; it takes whether the piece recomputes what checkpointing left out."""

    operation: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
    fused: Callable[[bool], contextlib.AbstractContextManager[None]]

    supports_higher_order_operators = True
    """Otherwise torch refuses operators of operators, which compiled code has."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile inside: otherwise it compiles nothing while somebody watches."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.prim.device.default:  # often called, and no operation
            return function(*args)
        # Compiled code that computes again has every operation with random numbers in one of these.
        if function is rng_prims.run_and_save_rng_state:
            return torch.get_rng_state(), self.operation(args[0], args[1:], kwargs or {})
        if function is rng_prims.run_with_rng_state:
            return self.operation(args[1], args[2:], kwargs or {})
        return self.operation(function, args, kwargs or {})


def in_backward() -> bool:
    """Whether the autograd engine runs; with gradients enabled, what checkpointing recomputes."""
    return torch._C._current_graph_task_id() != -1


def adds_gradients(function: Any, args: Any) -> bool:
    """Whether this is the autograd engine's addition of two gradients of one tensor, which happens
    in place without a dispatch mode, unless the first is a DTensor or something else holds it."""
    if function is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or not in_backward():
        return False
    first, second = args
    if isinstance(first, DTensor) or not isinstance(second, Tensor):
        return False
    alike = (first.shape, first.dtype) == (second.shape, second.dtype)
    storage = first.untyped_storage()
    held = first._use_count(), torch._C._storage_Use_Count(storage._cdata)
    return alike and held == ALONE


class Link(NamedTuple):
    """A collective, the name of its group, and the ranks of the group."""

    collective: Collective
    group: str
    ranks: tuple[int, ...]


def collective(function: Any, arguments: Sequence[Any]) -> tuple[Link, int] | None:
    """The collective that an operation is, and bytes of its largest tensor; None for others."""
    if function.namespace not in ("c10d", "_c10d_functional"):
        return None
    kind = COLLECTIVES.get(function._overloadpacket.__name__)
    if kind is None:
        return None
    size = max(one.numel() * one.itemsize for one in tensors_in(arguments))
    if function.namespace == "c10d":
        boxed = next(one for one in arguments if isinstance(one, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
    else:
        group = _resolve_process_group(arguments[-1])
        size *= group.size() if kind == "all-gather" else 1
    return Link(kind, group.group_name, tuple(dist.get_process_group_ranks(group))), size


def tensors_in(given: Any) -> Iterator[Tensor]:
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
    """The local tensor of a DTensor, without an operation; any other tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


@contextlib.contextmanager
def silent_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is one rank of `ranks`; nothing is sent, and every collective completes
    at once. The process group is the one of torch's tests."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts the rank in front of what this prints
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


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
            with contextlib.ExitStack() as stack:
                for mode in _get_current_dispatch_mode_stack():
                    if isinstance(mode, Watcher):
                        stack.enter_context(mode.fused(again))
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
