"""The recipe that the facts make: what each slot holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from pipeline.utils import COMMIT, expanded
from stages.importing.draft import Draft
from stages.importing.rules import FOREIGN, TABLES, why
from stages.importing.sources import HELDOUT, NO_COMMIT, is_local

LONGEST = 10_000
"""Largest denominator of a part of an epoch."""
TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")
"""Trackers of a recipe, `track.NAME`, as `report_to` calls them. The facts of each are called
NAME.FIELD, and NAME.use switches it on."""
FSDP_AXES = ("parallel.replicate", "parallel.shard", "parallel.tensor", "parallel.context")
SHARING = (*FSDP_AXES[2:], "parallel.sequence", "deepspeed.tensor", "parallel.ring")
"""Axes whose ranks get the same samples. deepspeed.tensor is DeepSpeed's AutoTP, parallel.ring any
strategy where a tool divides samples by itself."""


def compose(draft: Draft, name: str, put_data: Callable[[Draft], None]) -> Draft:
    """Make the recipe of the facts that were read. Its name is `name` unless they state one."""
    named = "name" if draft.given("name") else "output_name"
    draft.put("name", draft.value(named, name), named)
    _put_model(draft)
    put_data(draft)
    _put_optimizer(draft)
    _put_wrap(draft)
    draft.put("checkpoint.use", "checkpoint.sharded")
    _put_period(draft, "save", "checkpoint.every")
    # a slot for each tracker: `track`, or `track_wandb` and the like if there are several
    asked = {*draft.value("report_to", [])}
    if draft.value("wandb.mode") == "disabled":  # nothing is kept then
        draft.drop(why("no_wandb"), *draft.facts("wandb."))
        asked.discard("wandb")
    used = [name for name in TRACKERS if name in asked or draft.value(f"{name}.use")]
    for name in used:
        slot, use = "track" if len(used) == 1 else f"track_{name}", f"{name}.use"
        draft.put(f"{slot}.use", f"track.{name}", use, *["report_to"] * (name in asked))
        for fact in draft.facts(f"{name}."):
            if fact != use:
                draft.copy(fact, f"{slot}.{fact.removeprefix(f'{name}.')}")
        runs = draft.of("name")  # as the file has it; a recipe's name has fewer characters
        if runs and name != "tensorboard" and not draft.known(f"{name}.name"):
            draft.put(f"{slot}.name", str(runs[0].value), "name")
    _put_train(draft)
    draft.put("consolidate.use", "consolidate.stream")
    draft.put("export.use", "export.safetensors")
    strategy = draft.slots["wrap"]["use"].removeprefix("wrap.")
    for fact in draft.facts(""):
        slot, dot, field = fact.partition(".")
        if slot == strategy:
            draft.copy(fact, f"wrap.{field}")
        elif (dot and slot in draft.slots) or slot in ("launch", "seed"):
            draft.copy(fact)
    return draft


def _put_model(draft: Draft) -> None:
    """Fill the slots `model`, `adapter` and `precision`."""
    draft.put("model.use", "model.hf")
    name, revision = draft.value("model"), draft.value("revision")
    if draft.request.model is not None:
        draft.drop(why("replaced", "--model"), "model", "revision")
        name, _, revision = draft.request.model.partition("@")
    if name is None:
        draft.lacks("model.path")
    elif is_local(name) or name.endswith(".gguf"):
        draft.put("model.path", str(expanded(name).absolute()), "model")
    else:
        floats = not COMMIT.fullmatch(revision or "")
        draft.put("model.path", name, "model", note=NO_COMMIT if floats else "")
        if revision:
            draft.put("model.revision", revision, "revision")
    if draft.value("adapter"):
        draft.put("adapter.use", "adapter.lora", "adapter")
        draft.set_defaults("adapter", {}, "TRL's default")
        draft.lacks("adapter.targets")
        if draft.value("quantize"):
            kind = draft.value("quantization", "nf4")
            draft.put("adapter.quantize", kind, "quantize", "quantization")
    else:
        draft.drop(why("unsaid_adapter"), *draft.facts("adapter."), when=not draft.known("adapter"))
        draft.drop(why("trained_in_4_bits"), "quantize")
    draft.put("precision.use", "precision.policy")
    draft.default("precision.compute", "fp32", "no mixed precision is asked for")
    compute = draft.value("precision.compute")
    draft.drop(why("no_fp32"), "precision.tf32", when=compute != "fp32")
    scaling = ("precision.initial_loss_scale", "precision.loss_scale_growth_interval")
    draft.drop(why("idle"), *scaling, when=compute != "fp16")


def _put_optimizer(draft: Draft) -> None:
    draft.put("optimizer.use", "optimizer.adamw", "optimizer", "optim")
    for name, value in draft.value("optim", {}).items():
        draft.put(f"optimizer.{name}", value, "optim")
    for foreign in draft.of(FOREIGN)[:1]:
        draft.drop(why("other_rate", foreign.content), "optimizer.lr")
    draft.lacks("optimizer.lr")
    single = [draft.value("beta1", 0.9), draft.value("beta2", 0.999)]
    stated = next((entry.content for entry in draft.of("betas") if not entry.auto), None)
    if stated is not None:
        draft.put("optimizer.betas", stated, "betas")
        for fact, one, other in zip(("beta1", "beta2"), single, stated, strict=True):
            draft.drop(why("other_betas"), fact, when=one != other)
    elif any(map(draft.known, ("betas", "beta1", "beta2"))):
        draft.put("optimizer.betas", single, "betas", "beta1", "beta2")
    schedule = draft.value("deepspeed.schedule") or draft.value("schedule")
    other = draft.given("deepspeed.schedule") and draft.value("schedule", schedule) != schedule
    draft.drop(why("other_schedule"), "schedule", when=other)
    if schedule is not None:
        shape = "constant" if schedule == "flat" else schedule
        draft.put("optimizer.schedule", shape, "deepspeed.schedule", "schedule")
    ratio = draft.value("warmup_ratio")
    if schedule != "flat" and draft.value("warmup_steps"):
        draft.copy("warmup_steps", "optimizer.warmup_steps")
    elif schedule != "flat" and ratio:
        draft.put("optimizer.warmup_ratio", ratio, "warmup_ratio", "warmup_steps")
    if draft.known("final_lr") and draft.value("optimizer.lr"):
        final = draft.value("final_lr") / draft.value("optimizer.lr")
        draft.put("optimizer.final_lr_ratio", final, "final_lr")


def _put_wrap(draft: Draft) -> None:
    asked, stage = draft.value("distributed") or draft.value("strategy"), "zero.stage"
    if draft.given(stage) and asked in (None, "wrap.zero"):
        use = "wrap.zero" if draft.value(stage) else "wrap.ddp"
    else:
        draft.drop(why("other_strategy", asked), stage, when=draft.value(stage))
        use = "wrap.ddp" if asked in (None, "one") else str(asked)
    draft.put("wrap.use", use, "distributed", "strategy")
    policy, classes = draft.value("policy"), draft.value("classes")
    if use == "wrap.zero":
        draft.default(stage, 2, "accelerate's default")
        # without effect at this stage: `pipe check` would refuse them
        names = ["allgather_bucket_size", "round_robin_gradients"]
        if draft.value(stage) < 3:
            names = [*TABLES["stage3"], "offload_param.", "plus_plus."]
        names += ["overlap_comm"] * (draft.value(stage) == 1)
        draft.drop(why("idle"), *(fact for name in names for fact in draft.facts(f"zero.{name}")))
        for block in ("zero.offload_optimizer", "zero.offload_param"):
            device = draft.value(f"{block}.device", "none")
            idle = {"none": draft.facts(f"{block}."), "cpu": [f"{block}.path"]}.get(device, [])
            draft.drop(why("idle"), *idle)
    elif use == "wrap.fsdp":
        if policy == "block" or (classes and policy is None):
            draft.put("wrap.units", classes or "block", "classes", "policy")
        _put_fsdp_axes(draft)
    plain_zero = use == "wrap.ddp" and draft.given(stage)
    for taken, reason, *axes in (
        (use == "wrap.fsdp", "only_fsdp", *FSDP_AXES),
        (use == "wrap.zero" or plain_zero, "only_deepspeed", "parallel.sequence"),
        (use == "wrap.zero", "whole_layers", "deepspeed.tensor"),
    ):
        draft.drop(why(reason), *(one for one in axes if _ranks(draft, one) > 1), when=not taken)
    for axis in filter(lambda axis: _ranks(draft, axis) > 1, SHARING):
        field = "tensor" if axis.endswith(".tensor") else "context"
        draft.put(f"wrap.{field}_parallel.size", _ranks(draft, axis), axis)
    axes = ["parallel.replicate", *SHARING]
    procs, ranks = draft.request.procs or draft.value("procs"), _ranks(draft, *axes)
    if procs is not None and procs % ranks:
        used = (axis for axis in axes if _ranks(draft, axis) > 1)
        draft.drop(why("indivisible_processes", ranks, procs), *used)


def _ranks(draft: Draft, *axes: str) -> int:
    """Return the ranks of axes together, 1 for axes that no fact states."""
    return math.prod(int(draft.value(axis, 1)) for axis in axes)


def _put_fsdp_axes(draft: Draft) -> None:
    procs, total = draft.value("procs"), _ranks(draft, *FSDP_AXES)
    replicate, shard, _, context = (_ranks(draft, axis) for axis in FSDP_AXES)
    if draft.request.procs is None and procs is not None and total not in (1, procs):
        draft.drop(why("unequal_sizes", total, procs), *filter(draft.given, FSDP_AXES))
    elif replicate > 1 and shard == 1 and total > replicate:
        draft.drop(why("only_sharded"), *FSDP_AXES[2:])
    elif replicate > 1:
        draft.drop(why("idle"), "fsdp.sharding")
        draft.put("wrap.sharding", "hybrid_shard", "parallel.replicate")
        if draft.known("parallel.shard"):  # ranks that share a sample share its shards too
            draft.put("wrap.shard_size", shard * context, "parallel.shard")


def part_of_epoch(part: Fraction) -> str:
    """Return a part of an epoch as a recipe writes it: `1 epoch`, `0.25 epochs`, `1/3 epochs`."""
    found = part.limit_denominator(LONGEST) or Fraction(1, LONGEST)
    if found == 1:
        return "1 epoch"
    return f"{found if LONGEST % found.denominator else format(float(found), 'g')} epochs"


def _put_period(draft: Draft, event: str, key: str) -> bool:
    """Set `key` to the period of an event, `save` or `eval`; return whether there is one."""
    strategy, steps, part = (f"{event}_{name}" for name in ("strategy", "steps", "part"))
    asked = "part" if draft.given(part) else draft.value(strategy)
    if asked == "part":
        draft.copy(part, key)
    elif asked == "epoch":
        draft.put(key, "1 epoch", strategy)
    elif asked == "steps":
        # Evaluations come as often as records by default, and saves every 500 steps.
        default = 500 if event == "save" else draft.value("train.log_every", 500)
        found: Any = draft.value(steps) or default
        if not isinstance(found, int):  # a share of the training: of its steps, or of its epochs
            total, epochs = draft.value("train.steps"), draft.value("train.epochs", 1)
            share = found * Fraction(str(epochs))
            found = math.ceil(found * total) if total else part_of_epoch(share)
        draft.put(key, found, strategy, steps)
    return asked in ("part", "epoch", "steps")


def _put_train(draft: Draft) -> None:
    """Fill the slot `train`, and `launch.procs`."""
    draft.put("train.use", "train.causal_lm")
    planned, steps = draft.value("schedule_steps"), draft.value("train.steps")
    if planned is not None and not (draft.given("train.steps") or draft.given("train.epochs")):
        draft.put("train.steps", planned, "schedule_steps")
        draft.drop(why("idle"), "train.epochs")
    else:
        draft.drop(why("longer_schedule"), "schedule_steps", when=planned not in (None, steps))
        draft.drop(why("steps_count"), "train.epochs", when=draft.given("train.steps"))
        if not (draft.given("train.steps") or draft.known("train.epochs")):
            draft.lacks("train.steps")
    if (procs := draft.request.procs) is not None:
        draft.drop(why("replaced", "--procs"), "procs")
        draft.put("launch.procs", procs)
    else:
        alone = draft.value("distributed") == "one"
        draft.default("procs", 1, "distributed_type is NO", when=alone)
        draft.copy("procs", "launch.procs")
    procs = procs or draft.value("procs")
    facts = ("global_batch", "train.micro_batch_size", "accumulation", "procs")
    total, micro, accumulation = map(draft.value, facts[:3])
    ranks, sharing = _ranks(draft, "deepspeed.tensor"), _ranks(draft, *SHARING)
    if total is not None and total % ranks:
        draft.drop(why("indivisible_batch", ranks), "global_batch")
        total = None
    elif total is not None:  # DeepSpeed counts a sample once for each rank that AutoTP gives it to
        total //= ranks
    implied = micro * (accumulation or 1) * procs // sharing if micro and procs else None
    if None not in (total, implied) and total != implied and draft.given("accumulation"):
        shares = f" / {sharing} that share a sample" if sharing > 1 else ""
        draft.drop(why("other_batch", micro, accumulation, procs, shares), "global_batch")
    if total is not None or implied is not None:
        draft.put("train.global_batch_size", total or implied, *facts)
    else:
        draft.lacks("train.global_batch_size")
        draft.copy("accumulation", "train.accumulation")
    evaluates = _put_period(draft, "eval", "train.eval_every") or draft.known("train.eval_every")
    if evaluates and not (draft.facts("data.heldout") or draft.slots["data"].keys() & {*HELDOUT}):
        draft.lacks("data.heldout_fraction")
    compared = draft.facts("train.early_stopping") + draft.facts("checkpoint.keep_best")
    draft.drop(why("no_evaluation"), *compared, when=not evaluates)
