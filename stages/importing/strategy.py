"""The slot `wrap`: which strategy the files ask for, and its fields."""

from __future__ import annotations

from stages.importing.account import Draft
from stages.importing.sources import hidden_size
from stages.importing.zero import HIDDEN

OWN = {
    "wrap.ddp": ("ddp.",),
    "wrap.fsdp": ("fsdp.", "parallel."),
    "wrap.zero": ("zero.", "offload_optimizer.", "offload_param.", "extra.", "aio."),
}
"""Prefixes of the facts that each strategy takes."""
STAGE_3 = (
    "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "sub_group_size",
)  # fmt: skip
NVME = (
    *("path", "buffer_count", "fast_init", "pipeline_read", "pipeline_write"),
    *("buffer_size", "max_in_cpu"),
)
BY_BLOCK = "modules are gathered block by block, which takes less memory and gives the same numbers"


def wrap(draft: Draft) -> None:
    """Slot `wrap`."""
    account = draft.account
    use = _strategy(draft)
    draft.slot("wrap", use)
    draft.put("wrap.use", use, "distributed", "strategy", "fsdp.version")
    if use == "wrap.zero":
        _zero(draft)
    elif use == "wrap.fsdp":
        _fsdp(draft)
    else:
        for name in ("bucket_cap_mb", "find_unused_parameters", "static_graph"):
            draft.copy(f"ddp.{name}", f"wrap.{name}")
        if account.given("zero.stage"):
            draft.put("wrap.use", use, "zero.stage")
    _parallelism(draft, use)
    for other, prefixes in OWN.items():
        for prefix in prefixes if other != use else ():
            for name in account.facts(prefix):
                account.dismiss(f"{prefix}{name}", f"belongs to {other}, which is not used")


def _parallelism(draft: Draft, use: str) -> None:
    """Sizes of groups that only FSDP makes."""
    for fact in ("parallel.replicate", "parallel.shard"):
        if use != "wrap.fsdp" and draft.account.value(fact, 1) > 1:
            why = "accelerate takes it with FSDP alone"
            draft.account.refuse(fact, why, "set distributed_type: FSDP", blocks=True)


def _strategy(draft: Draft) -> str:
    account = draft.account
    asked = account.value("distributed") or account.value("strategy")
    if account.given("zero.stage") and asked in (None, "wrap.zero"):
        return "wrap.zero" if account.value("zero.stage") else "wrap.ddp"
    if account.given("zero.stage") and account.value("zero.stage"):
        account.refuse(
            "zero.stage", f"contradicts {asked}, which another file asks for", blocks=True
        )
    if asked == "wrap.zero":
        return "wrap.zero"
    return "wrap.ddp" if asked in (None, "one") else str(asked)


def _fsdp(draft: Draft) -> None:
    account = draft.account
    replicas = account.value("parallel.replicate", 1)
    if replicas > 1:
        draft.put("wrap.sharding", "hybrid_shard", "parallel.replicate", "fsdp.sharding")
        draft.copy("parallel.shard", "wrap.shard_size")
    else:
        draft.copy("fsdp.sharding", "wrap.sharding")
    account.dismiss("parallel.replicate", "is 1")
    account.dismiss("parallel.shard", "are all processes")
    draft.copy("fsdp.cpu_offload", "wrap.cpu_offload")
    draft.copy("fsdp.forward_prefetch", "wrap.forward_prefetch")
    _units(draft)


def _units(draft: Draft) -> None:
    account = draft.account
    units = account.value("fsdp.units")
    if units == "size" and account.given("fsdp.unit_size"):
        draft.put("wrap.units", "size", "fsdp.units")
        draft.copy("fsdp.unit_size", "wrap.unit_size")
    elif account.given("fsdp.classes") and units in (None, "block"):
        draft.put("wrap.units", account.value("fsdp.classes"), "fsdp.classes", "fsdp.units")
    elif units == "block":
        draft.put("wrap.units", "block", "fsdp.units")
    for fact in ("fsdp.units", "fsdp.classes", "fsdp.unit_size"):
        account.dismiss(fact, BY_BLOCK if fact == "fsdp.units" else "belongs to another policy")


def _zero(draft: Draft) -> None:
    account = draft.account
    account.assume("zero.stage", 2, "accelerate's default")
    stage = account.value("zero.stage")
    draft.copy("zero.stage", "wrap.stage")
    _automatic_sizes(draft)
    if stage < 3:
        for name in STAGE_3:
            account.dismiss(f"zero.{name}", "means nothing below stage 3")
    else:
        account.dismiss("zero.allgather_bucket_size", "means nothing at stage 3")
        account.dismiss("zero.round_robin_gradients", "means nothing at stage 3")
    if stage == 1:
        account.dismiss("zero.overlap_comm", "stage 1 reduces gradients once a step")
    for name in account.facts("zero."):
        entries = account.of(f"zero.{name}")
        if name.startswith("extra."):
            draft.copy(f"zero.{name}", f"wrap.extra.zero_optimization.{name[6:]}")
        elif name == "torch_adam":
            _kernel(draft)
        elif name != "stage" and any(e.verdict.outcome == "translated" for e in entries):
            draft.copy(f"zero.{name}", f"wrap.{name}")
    for block in ("offload_optimizer", "offload_param"):
        _offload(draft, block, stage)
    for name in account.facts("aio."):
        draft.copy(f"aio.{name}", f"wrap.aio.{name}")
    for name in account.facts("extra."):
        draft.copy(f"extra.{name}", f"wrap.extra.{name}")


def _automatic_sizes(draft: Draft) -> None:
    """`auto` as transformers resolves it, if the model's size is known."""
    account = draft.account
    hidden = hidden_size(draft)
    for name in list(account.facts("zero.")):
        fact = f"zero.{name}"
        if account.value(fact) is not None:
            continue
        if hidden is not None and name in HIDDEN:
            account.assume(fact, HIDDEN[name](hidden), f"auto, for hidden size {hidden}")
        elif name in HIDDEN:
            account.dismiss(
                fact, "auto: DeepSpeed's default; of the hidden size if --model is a folder"
            )
        else:
            account.dismiss(fact, "auto: the default of wrap.zero")


def _kernel(draft: Draft) -> None:
    if draft.account.value("zero.torch_adam"):
        draft.put("wrap.optimizer_implementation", "torch", "zero.torch_adam")
    draft.account.dismiss("zero.torch_adam", "the kernel follows from where the optimizer is")


def _offload(draft: Draft, block: str, stage: int) -> None:
    account = draft.account
    device = account.value(f"{block}.device", "none")
    names = list(account.facts(f"{block}."))
    if device == "none":
        for name in names:
            account.dismiss(f"{block}.{name}", "nothing is offloaded")
        return
    if block == "offload_param" and stage < 3:
        for name in names:
            account.refuse(f"{block}.{name}", "parameters are offloaded at stage 3 only")
        return
    for name in names:
        fact = f"{block}.{name}"
        if account.value(fact) is None:
            account.dismiss(fact, "auto: the default of wrap.zero")
        elif name in NVME and device != "nvme":
            account.dismiss(fact, "belongs to device nvme")
        else:
            draft.copy(fact, f"wrap.{fact}")
