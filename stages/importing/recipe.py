"""The recipe that the facts make: what each slot holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

from pipeline.utils import COMMIT
from stages.importing.draft import NO_EFFECT, Draft
from stages.importing.engines import STAGE_3
from stages.importing.parallelism import AUTO, parallelism, sharing_ranks, size
from stages.importing.rules import FOREIGN
from stages.importing.sources import NO_COMMIT, has_heldout, is_local
from stages.importing.trackers import ASKED, DISABLED, TRACKERS

Fill: TypeAlias = Callable[[Draft], None]
_LOW = (*(f"zero.{name}" for name in STAGE_3), "zero.offload_param.", "zero.plus_plus.")
UNUSED: Mapping[int, tuple[str, ...]] = {
    0: _LOW, 1: (*_LOW, "zero.overlap_comm"), 2: _LOW,
    3: ("zero.allgather_bucket_size", "zero.round_robin_gradients"),
}  # fmt: skip
"""Stage of ZeRO -> beginnings of the facts that have no effect there."""
LONGEST = 10_000
"""Largest denominator of a part of an epoch."""


def compose(draft: Draft, name: str, data: Fill) -> Draft:
    """Make the recipe of the facts that were read. Its name is `name` unless they give one, and
    `data` fills the slot of that name."""
    named = "name" if draft.given("name") else "output_name"
    draft.put("name", draft.value(named, name), named)
    _model(draft)
    _adapter(draft)
    _precision(draft)
    data(draft)
    _optimizer(draft)
    _wrap(draft)
    draft.slot("checkpoint", "checkpoint.sharded")
    _put_period(draft, "save", "checkpoint.every")
    _trackers(draft)
    _train(draft)
    draft.slot("consolidate", "consolidate.stream")
    draft.slot("export", "export.safetensors")
    draft.copy_all()
    return draft


def _model(draft: Draft) -> None:
    draft.slot("model", "model.hf")
    name, revision = draft.value("model"), draft.value("revision")
    if draft.request.model is not None:
        draft.drop("ignored --model replaces it", "model", "revision")
        name, _, revision = draft.request.model.partition("@")
    if name is None:
        draft.lacks("model.path", "a folder (./model), a GGUF file or a hub id")
    elif is_local(name) or name.endswith(".gguf"):
        draft.put("model.path", str(Path(name).expanduser().absolute()), "model")
    else:
        floats = not COMMIT.fullmatch(revision or "")
        draft.put("model.path", name, "model", note=NO_COMMIT if floats else "")
        if revision:
            draft.put("model.revision", revision, "revision")


def _adapter(draft: Draft) -> None:
    if draft.value("adapter"):
        draft.slot("adapter", "adapter.lora", "adapter")
        for name, value in (("rank", 16), ("alpha", 32.0), ("dropout", 0.05)):
            draft.default(f"adapter.{name}", value, "TRL's default")
        what = "ends of layers' names, or all-linear; peft chose by the architecture"
        draft.lacks("adapter.targets", what)
        if draft.value("quantize"):
            kind = draft.value("quantization", "nf4")
            draft.put("adapter.quantize", kind, "quantize", "quantization")
        return
    unsaid = "refused means LoRA, or nothing without use_peft !! set use_peft to true or false"
    draft.drop(unsaid, *draft.facts("adapter."), when=not draft.known("adapter"))
    draft.drop("refused weights that are trained are not held in 4 bits -- train an adapter",
               "quantize")  # fmt: skip


def _precision(draft: Draft) -> None:
    draft.slot("precision", "precision.policy")
    draft.default("precision.compute", "fp32", "no mixed precision is asked for")
    compute = draft.value("precision.compute")
    draft.drop("ignored no product is in fp32", "precision.tf32", when=compute != "fp32")
    scaling = ("precision.initial_loss_scale", "precision.loss_scale_growth_interval")
    draft.drop(NO_EFFECT, *scaling, when=compute != "fp16")


def _wrap(draft: Draft) -> None:
    asked, stage = draft.value("distributed") or draft.value("strategy"), "zero.stage"
    if draft.given(stage) and asked in (None, "wrap.zero"):
        use = "wrap.zero" if draft.value(stage) else "wrap.ddp"
    else:
        other = f"refused contradicts {asked}, which another file asks for !!"
        draft.drop(other, stage, when=bool(draft.value(stage)))
        use = "wrap.ddp" if asked in (None, "one") else str(asked)
    draft.slot("wrap", use, "distributed", "strategy")
    policy, classes = draft.value("policy"), draft.value("classes")
    if use == "wrap.zero":
        draft.default(stage, 2, "accelerate's default")
        # What `pipe check` would refuse, as it has no effect, is left out.
        beginnings = UNUSED[draft.value(stage)]
        unused = [fact for fact in draft.facts("zero.") if fact.startswith(beginnings)]
        for block in ("zero.offload_optimizer", "zero.offload_param"):
            device = draft.value(f"{block}.device", "none")
            unused += {"none": draft.facts(f"{block}."), "cpu": [f"{block}.path"]}.get(device, [])
        draft.drop(NO_EFFECT, *unused)
    elif use == "wrap.fsdp" and (policy == "block" or (classes and policy is None)):
        draft.put("wrap.units", classes or "block", "classes", "policy")
    parallelism(draft, use)


def _trackers(draft: Draft) -> None:
    """Add a slot for each tracker: `track`, or `track_wandb` and the like if there are several."""
    asked = {*draft.value(ASKED, [])}
    if draft.value("wandb.mode") == DISABLED:
        draft.drop("ignored wandb_mode is disabled", *draft.facts("wandb."))
        asked.discard("wandb")
    used = [name for name in TRACKERS if name in asked or draft.value(f"{name}.use")]
    for name in used:
        slot, use = "track" if len(used) == 1 else f"track_{name}", f"{name}.use"
        draft.slot(slot, f"track.{name}", use, *([ASKED] if name in asked else []))
        for fact in draft.facts(f"{name}."):
            if fact != use:
                draft.copy(fact, f"{slot}.{fact.removeprefix(f'{name}.')}")
        runs = draft.of("name")  # as the file has it; a recipe's name has fewer characters
        if runs and name != "tensorboard" and not draft.known(f"{name}.name"):
            draft.put(f"{slot}.name", str(runs[0].value), "name")


def part_of_epoch(part: Fraction) -> str:
    """Return a part of an epoch as a recipe writes it: `1 epoch`, `0.25 epochs`, `1/3 epochs`."""
    found = part.limit_denominator(LONGEST) or Fraction(1, LONGEST)
    if found == 1:
        return "1 epoch"
    return f"{found if LONGEST % found.denominator else format(float(found), 'g')} epochs"


def _put_period(draft: Draft, event: str, key: str) -> bool:
    """Set `key` to the period of an event, `save` or `eval`, if the facts say that there is one.
    Returns whether they do."""
    strategy, steps, part = (f"{event}_{name}" for name in ("strategy", "steps", "part"))
    if draft.given(part):
        draft.copy(part, key)
        return True
    asked = draft.value(strategy)
    if asked == "epoch":
        draft.put(key, "1 epoch", strategy)
    elif asked == "steps":
        # Evaluations come as often as records by default, and saves every 500 steps.
        default = 500 if event == "save" else draft.value("train.log_every", 500)
        found = draft.value(steps) or default
        if not isinstance(found, int):  # a share of the training: of its steps, or of its epochs
            total, epochs = draft.value("train.steps"), draft.value("train.epochs", 1)
            share = found * Fraction(str(epochs))
            found = math.ceil(found * total) if total else part_of_epoch(share)
        draft.put(key, found, strategy, steps)
    return asked in ("steps", "epoch")


def _optimizer(draft: Draft) -> None:
    """Fill the slot `optimizer`."""
    draft.slot("optimizer", "optimizer.adamw", "optimizer", "optim")
    for name, value in draft.value("optim", {}).items():
        draft.put(f"optimizer.{name}", value, "optim")
    for foreign in draft.of(FOREIGN)[:1]:
        why = f"refused is a rate for {foreign.content}, and this is AdamW"
        hint = "fill in optimizer.lr, for the optimizer that you choose"
        draft.drop(f"{why} -- {hint}", "optimizer.lr")
    draft.lacks("optimizer.lr", "the learning rate, which the files do not give")
    single = [draft.value("beta1", 0.9), draft.value("beta2", 0.999)]
    stated = next((entry.content for entry in draft.of("betas") if not entry.auto), None)
    if stated is not None:
        draft.put("optimizer.betas", stated, "betas")
        differs = "refused contradicts DeepSpeed's betas !! use the same value in both"
        for fact, one, other in zip(("beta1", "beta2"), single, stated, strict=True):
            draft.drop(differs, fact, when=one != other)
    elif any(map(draft.known, ("betas", "beta1", "beta2"))):
        draft.put("optimizer.betas", single, "betas", "beta1", "beta2")
    _schedule(draft)


def _schedule(draft: Draft) -> None:
    schedule = draft.value("deepspeed.schedule") or draft.value("schedule")
    other = draft.given("deepspeed.schedule") and draft.value("schedule", schedule) != schedule
    draft.drop(
        "refused DeepSpeed's scheduler wins, as it does in transformers", "schedule", when=other
    )
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


def _train(draft: Draft) -> None:
    """Fill the slot `train`, and `launch.procs`."""
    draft.slot("train", "train.causal_lm")
    _length(draft)
    if (procs := draft.request.procs) is not None:
        draft.drop("ignored --procs replaces it", "procs")
        draft.put("launch.procs", procs)
    else:
        one = draft.value("distributed") == "one"
        draft.default("procs", 1, "distributed_type is NO", when=one)
        draft.copy("procs", "launch.procs")
        procs = draft.value("procs")
    _batch(draft, procs)
    evaluates = _put_period(draft, "eval", "train.eval_every") or draft.known("train.eval_every")
    if evaluates and not (draft.facts("data.heldout") or has_heldout(draft)):
        draft.lacks("data.heldout_fraction", "a part to evaluate on, or heldout_files")
    compared = draft.facts("train.early_stopping") + draft.facts("checkpoint.keep_best")
    why = "refused compares evaluations, and there are none before the end"
    hint = "evaluate every so many steps, or epochs"
    draft.drop(f"{why} -- {hint}", *compared, when=not evaluates)


def _length(draft: Draft) -> None:
    planned = draft.value("schedule_steps")
    if planned is not None and not (draft.given("train.steps") or draft.given("train.epochs")):
        draft.put("train.steps", planned, "schedule_steps")
        draft.drop(NO_EFFECT, "train.epochs")
        return
    longer = planned not in (None, draft.value("train.steps"))
    why = "refused the schedule ends with the training -- train as long as the schedule"
    draft.drop(why, "schedule_steps", when=longer)
    if draft.given("train.steps"):
        draft.drop("ignored the number of steps counts", "train.epochs")
    elif not draft.known("train.epochs"):
        draft.lacks("train.steps", "how long to train, or `epochs`")


BATCH = ("global_batch", "train.micro_batch_size", "accumulation", "procs")


def _batch(draft: Draft, procs: int | None) -> None:
    total, micro, accumulation = map(draft.value, BATCH[:3])
    ranks, sharing = size(draft, AUTO), sharing_ranks(draft)
    if total is not None and total % ranks:
        why = f"refused counts each sample for {ranks} ranks, which do not divide it !!"
        draft.drop(why, "global_batch")
        total = None
    elif total is not None:  # DeepSpeed counts a sample once for each rank that AutoTP gives it to
        total //= ranks
    implied = micro * (accumulation or 1) * procs // sharing if micro and procs else None
    if None not in (total, implied) and total != implied and draft.given("accumulation"):
        shares = f" / {sharing} that share a sample" if sharing > 1 else ""
        why = f"is not {micro} a process x {accumulation} micro-batches x {procs} processes{shares}"
        hint = "give the number of processes with --procs"
        draft.drop(f"refused {why} !! {hint}", "global_batch")
    if total is not None or implied is not None:
        draft.put("train.global_batch_size", total or implied, *BATCH)
        return
    what = "samples in one step over all processes; --procs sets their number"
    draft.lacks("train.global_batch_size", what)
    draft.copy("accumulation", "train.accumulation")
