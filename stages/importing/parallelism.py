"""Axes of parallelism beside the data-parallel one, and the ranks that share a sample."""

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
FIELDS = {TENSOR: "tensor_parallel", CONTEXT: "context_parallel"}
_FSDP_ALONE = "accelerate takes it only with FSDP"


def size(report: Report, fact: str) -> int:
    """Return the ranks of an axis, 1 without it."""
    return int(report.value(fact, 1))


def sharing_ranks(report: Report) -> int:
    """Return the number of ranks that get the same samples."""
    return math.prod(size(report, fact) for fact in (TENSOR, CONTEXT, SEQUENCE, AUTO, RING))


def parallelism(draft: Draft, use: str, request: Request) -> None:
    """Fill the axes of the slot `wrap`, and refuse those that its stage does not have."""
    report = draft.report
    if use == "wrap.fsdp":
        _fsdp(draft, request)
    else:
        wrong = [one for one in (REPLICATE, SHARD, TENSOR, CONTEXT) if size(report, one) > 1]
        hint = "set distributed_type: FSDP"
        report.refuse(*wrong, why=_FSDP_ALONE, hint=hint, blocks=True)
    if size(report, RING) > 1:
        draft.put("wrap.context_parallel.size", size(report, RING), RING)
    if size(report, SEQUENCE) > 1:
        if use == "wrap.zero" or (use == "wrap.ddp" and report.given("zero.stage")):
            draft.put("wrap.context_parallel.size", size(report, SEQUENCE), SEQUENCE)
        else:
            why, hint = "accelerate takes it only with DeepSpeed", "with FSDP, set cp_size"
            report.refuse(SEQUENCE, why=why, hint=hint, blocks=True)
    if size(report, AUTO) > 1:
        if use == "wrap.zero":
            draft.put("wrap.tensor_parallel.size", size(report, AUTO), AUTO)
        else:
            why, hint = "without sharding, each rank has whole layers", "set stage: 1, 2 or 3"
            report.refuse(AUTO, why=why, hint=hint, blocks=True)
    _fits(report, request)


def _fits(report: Report, request: Request) -> None:
    """Refuse sizes that do not divide the number of processes."""
    procs = request.procs or report.value("procs")
    axes = (REPLICATE, TENSOR, CONTEXT, SEQUENCE, AUTO, RING)
    ranks = math.prod(size(report, one) for one in axes)
    if procs is not None and procs % ranks:
        why = f"the sizes multiply to {ranks}, which does not divide {procs} processes"
        hint = "give the number of processes with --procs"
        report.refuse(*(one for one in axes if size(report, one) > 1), why=why, hint=hint,
                      blocks=True)  # fmt: skip


def _fsdp(draft: Draft, request: Request) -> None:
    report = draft.report
    sizes = {one: size(report, one) for one in (REPLICATE, SHARD, TENSOR, CONTEXT)}
    total, procs = math.prod(sizes.values()), report.value("procs")
    given = [one for one in sizes if report.given(one)]
    if request.procs is None and procs is not None and total not in (1, procs):
        why = f"the sizes multiply to {total}, and there are {procs} processes"
        report.refuse(*given, why=why, hint="accelerate starts with equal numbers", blocks=True)
        return
    if sizes[REPLICATE] > 1 and sizes[SHARD] == 1 and total > sizes[REPLICATE]:
        why = "accelerate takes it only with dp_shard_size > 1"
        report.refuse(TENSOR, CONTEXT, why=why, hint="raise dp_shard_size", blocks=True)
        return
    for fact, field in FIELDS.items():
        if sizes[fact] > 1:
            draft.put(f"wrap.{field}.size", sizes[fact], fact)
    if sizes[REPLICATE] > 1:
        report.ignore("fsdp.sharding")
        draft.put("wrap.sharding", "hybrid_shard", REPLICATE)
        if report.known(SHARD):  # ranks that share a sample share its shards too
            draft.put("wrap.shard_size", sizes[SHARD] * sizes[CONTEXT], SHARD)
