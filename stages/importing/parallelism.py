"""Axes of parallelism next to the data-parallel one, and the ranks that share a sample."""

from __future__ import annotations

import math

from pipeline.importing import Request
from stages.importing.report import Draft, Report

REPLICATE, SHARD = "parallel.replicate", "parallel.shard"
TENSOR, CONTEXT, SEQUENCE = "parallel.tensor", "parallel.context", "parallel.sequence"
AUTO = "deepspeed.tensor"
"""DeepSpeed's AutoTP."""
RING = "parallel.ring"
"""Ranks that share a sample under every strategy, where a tool divides samples by itself."""


def size(report: Report, fact: str) -> int:
    """Return the ranks of an axis, 1 without it."""
    return int(report.value(fact, 1))


def sharing_ranks(report: Report) -> int:
    """Return the number of ranks that get the same samples."""
    return math.prod(size(report, fact) for fact in (TENSOR, CONTEXT, SEQUENCE, AUTO, RING))


def parallelism(draft: Draft, use: str, request: Request) -> None:
    """Fill the axes of the slot `wrap`, and refuse those that its stage does not have."""
    if use == "wrap.fsdp":
        _fsdp(draft, request)
    else:
        why, hint = "accelerate takes it only with FSDP", "set distributed_type: FSDP"
        _refuse(draft, REPLICATE, SHARD, TENSOR, CONTEXT, why=why, hint=hint)
    _put(draft, RING, "context_parallel")
    if use == "wrap.zero" or (use == "wrap.ddp" and draft.given("zero.stage")):
        _put(draft, SEQUENCE, "context_parallel")
    else:
        why, hint = "accelerate takes it only with DeepSpeed", "with FSDP, set cp_size"
        _refuse(draft, SEQUENCE, why=why, hint=hint)
    if use == "wrap.zero":
        _put(draft, AUTO, "tensor_parallel")
    else:
        why, hint = "without sharding, each rank has whole layers", "set stage: 1, 2 or 3"
        _refuse(draft, AUTO, why=why, hint=hint)
    procs = request.procs or draft.value("procs")
    axes = (REPLICATE, TENSOR, CONTEXT, SEQUENCE, AUTO, RING)
    ranks = math.prod(size(draft, one) for one in axes)
    if procs is not None and procs % ranks:
        why = f"the sizes multiply to {ranks}, which does not divide {procs} processes"
        _refuse(draft, *axes, why=why, hint="give the number of processes with --procs")


def _put(draft: Draft, axis: str, field: str) -> None:
    if size(draft, axis) > 1:
        draft.put(f"wrap.{field}.size", size(draft, axis), axis)


def _refuse(report: Report, *axes: str, why: str, hint: str) -> None:
    used = [axis for axis in axes if size(report, axis) > 1]
    report.refuse(*used, why=why, hint=hint, blocks=True)


def _fsdp(draft: Draft, request: Request) -> None:
    sizes = {one: size(draft, one) for one in (REPLICATE, SHARD, TENSOR, CONTEXT)}
    total, procs = math.prod(sizes.values()), draft.value("procs")
    if request.procs is None and procs is not None and total not in (1, procs):
        given = [one for one in sizes if draft.given(one)]
        why = f"the sizes multiply to {total}, and there are {procs} processes"
        draft.refuse(*given, why=why, hint="accelerate starts with equal numbers", blocks=True)
        return
    if sizes[REPLICATE] > 1 and sizes[SHARD] == 1 and total > sizes[REPLICATE]:
        why = "accelerate takes it only with dp_shard_size > 1"
        draft.refuse(TENSOR, CONTEXT, why=why, hint="raise dp_shard_size", blocks=True)
        return
    _put(draft, TENSOR, "tensor_parallel")
    _put(draft, CONTEXT, "context_parallel")
    if sizes[REPLICATE] > 1:
        draft.ignore("fsdp.sharding")
        draft.put("wrap.sharding", "hybrid_shard", REPLICATE)
        if draft.known(SHARD):  # ranks that share a sample share its shards too
            draft.put("wrap.shard_size", sizes[SHARD] * sizes[CONTEXT], SHARD)
