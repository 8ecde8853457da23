"""Bytes that collectives of real engines move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed
from torch import Tensor

from pipeline.contracts.precision import Precision
from pipeline.distributed.process_group import DistContext
from tests.support.runs import context, tiny_model
from tests.support.state import ADAMW, train

LITTLE = 64
"""Largest size of norms and losses, in bytes; they do not count."""


def counted(
    dist: DistContext,
    folder: str,
    wraps: Iterable[Any],
    model: Mapping[str, Any],
    microbatches: int,
) -> list[dict[str, int]]:
    """Return the bytes of whole tensors by collective, in the fourth step of each wrap stage.
    Engines compute in bf16 and reduce in fp32, but DDP reduces in bf16."""
    found = Counter[str]()
    _count(found)
    ctx = context(dist, folder)
    told = []
    for wrap in wraps:
        precision = policy(wrap)
        engine = wrap.run(ctx, tiny_model(ctx, model, ""), precision, ADAMW.run(ctx))
        train(engine, 0, 3, dist.world_size * microbatches)
        found.clear()
        train(engine, 3, 4, dist.world_size * microbatches)
        told.append(dict(+found))  # without what is 0
        engine.close()
    return told


def policy(wrap: Any) -> Precision:
    """Return the dtypes for a wrap stage here."""
    reduce = "bf16" if type(wrap).__name__ == "Ddp" else "fp32"
    return Precision(
        master="fp32", compute="bf16", reduce=reduce, buffer=None, loss_scaling=None  # type: ignore[arg-type]
    )  # fmt: skip


def _count(found: Counter[str]) -> None:
    """Have every process group add up the bytes that it is given."""

    def count(method: str, collective: str, which: int) -> None:
        original: Callable[..., Any] = getattr(torch.distributed.ProcessGroup, method)

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            size = _bytes(args[which])
            found[collective] += size if size > LITTLE else 0
            return original(group, *args, **kwargs)

        setattr(torch.distributed.ProcessGroup, method, call)

    for name in ("all_gather_single", "all_gather_single_coalesced", "allgather"):
        count(name, "all-gather", 0)
    for name in ("reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter"):
        count(name, "reduce-scatter", 1)
    for name in ("allreduce", "allreduce_coalesced"):
        count(name, "all-reduce", 0)
    count("broadcast", "broadcast", 0)


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors))
