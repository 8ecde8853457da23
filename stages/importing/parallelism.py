"""Axes of parallelism next to the data-parallel one, and the ranks that share a sample."""

from __future__ import annotations

import math

from stages.importing.draft import NO_EFFECT, Draft

REPLICATE, SHARD = "parallel.replicate", "parallel.shard"
TENSOR, CONTEXT, SEQUENCE = "parallel.tensor", "parallel.context", "parallel.sequence"
AUTO = "deepspeed.tensor"
"""DeepSpeed's AutoTP."""
RING = "parallel.ring"
"""Ranks that share a sample under every strategy, where a tool divides samples by itself."""
ONLY_FSDP = "refused accelerate takes it only with FSDP !! set distributed_type: FSDP"
ONLY_DEEPSPEED = "refused accelerate takes it only with DeepSpeed !! with FSDP, set cp_size"
WHOLE = "refused without sharding, each rank has whole layers !! set stage: 1, 2 or 3"


def size(draft: Draft, fact: str) -> int:
    """Return the ranks of an axis, 1 without it."""
    return int(draft.value(fact, 1))


def sharing_ranks(draft: Draft) -> int:
    """Return the number of ranks that get the same samples."""
    return math.prod(size(draft, fact) for fact in (TENSOR, CONTEXT, SEQUENCE, AUTO, RING))


def parallelism(draft: Draft, use: str) -> None:
    """Fill the axes of the slot `wrap`, and refuse those that its stage does not have."""
    fsdp, zero = use == "wrap.fsdp", use == "wrap.zero"
    if fsdp:
        _fsdp(draft)
    plain_zero = use == "wrap.ddp" and draft.given("zero.stage")
    for taken, why, *axes in (
        (fsdp, ONLY_FSDP, REPLICATE, SHARD, TENSOR, CONTEXT),
        (zero or plain_zero, ONLY_DEEPSPEED, SEQUENCE),
        (zero, WHOLE, AUTO),
    ):
        draft.drop(why, *(axis for axis in axes if size(draft, axis) > 1), when=not taken)
    for axis, field in ((RING, "context"), (SEQUENCE, "context"), (AUTO, "tensor")):
        _put(draft, axis, field)
    procs = draft.request.procs or draft.value("procs")
    sharing = (REPLICATE, TENSOR, CONTEXT, SEQUENCE, AUTO, RING)
    ranks = math.prod(size(draft, one) for one in sharing)
    if procs is not None and procs % ranks:
        why = f"refused the sizes multiply to {ranks}, which does not divide {procs} processes"
        used = (axis for axis in sharing if size(draft, axis) > 1)
        draft.drop(f"{why} !! give the number of processes with --procs", *used)


def _put(draft: Draft, axis: str, field: str) -> None:
    if size(draft, axis) > 1:
        draft.put(f"wrap.{field}_parallel.size", size(draft, axis), axis)


def _fsdp(draft: Draft) -> None:
    sizes = {one: size(draft, one) for one in (REPLICATE, SHARD, TENSOR, CONTEXT)}
    total, procs = math.prod(sizes.values()), draft.value("procs")
    if draft.request.procs is None and procs is not None and total not in (1, procs):
        why = f"refused the sizes multiply to {total}, and there are {procs} processes"
        given = (one for one in sizes if draft.given(one))
        draft.drop(f"{why} !! accelerate starts with equal numbers", *given)
        return
    if sizes[REPLICATE] > 1 and sizes[SHARD] == 1 and total > sizes[REPLICATE]:
        why = "refused accelerate takes it only with dp_shard_size > 1 !! raise dp_shard_size"
        draft.drop(why, TENSOR, CONTEXT)
        return
    _put(draft, TENSOR, "tensor")
    _put(draft, CONTEXT, "context")
    if sizes[REPLICATE] > 1:
        draft.drop(NO_EFFECT, "fsdp.sharding")
        draft.put("wrap.sharding", "hybrid_shard", REPLICATE)
        if draft.known(SHARD):  # ranks that share a sample share its shards too
            draft.put("wrap.shard_size", sizes[SHARD] * sizes[CONTEXT], SHARD)
