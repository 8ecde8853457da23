"""What is private or differs between torch versions about DistributedDataParallel, in one place."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def no_buffer_sync() -> dict[str, Any]:
    """Arguments that keep buffers from being broadcast at every forward.

    They are the same everywhere from birth, and no causal language model updates one in forward.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    # torch 2.13 renamed the argument and deprecates the old name.
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def hook_states(model: DistributedDataParallel) -> list[object]:
    """What the registered communication hooks were registered with."""
    return [state for _, state in model._comm_hooks]


def settle_buckets(model: DistributedDataParallel) -> None:
    """Have torch lay out its buckets for good (collective).

    It does so anew after the first backward, in the order in which gradients came. On three or more
    ranks the layout decides the order of summation, so a resumed run's first step would differ in
    the last bits from an undisturbed run's. A backward of nothing at birth settles it in both.
    """
    nothing: Any = sum(p.sum() * 0.0 for p in model.parameters() if p.requires_grad)
    # As its forward does: what it finds no way to from here counts as ready.
    model.reducer.prepare_for_backward([nothing] if model.find_unused_parameters else [])
    nothing.backward()
    model.zero_grad(set_to_none=not keeps_gradients(model))


def keeps_gradients(model: DistributedDataParallel) -> bool:
    """Whether gradients stay as zeros between steps. They are views of buckets, which are there
    anyway; without them, micro-batches before the last would take as much again. Where a parameter
    may be left without one, it must be none.

    From the first step on: torch multiplies by 1 / n what it copies into a bucket, and divides by n
    what is there already, which differs in the last bits.
    """
    return bool(
        model.gradient_as_bucket_view
        and not model.find_unused_parameters
        and not model.static_graph
    )
