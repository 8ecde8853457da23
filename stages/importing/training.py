"""The slots for the optimizer and the training loop, and how often a recipe saves and evaluates."""

from __future__ import annotations

import math
from fractions import Fraction

from stages.importing.draft import NO_EFFECT, Draft
from stages.importing.parallelism import AUTO, sharing_ranks, size
from stages.importing.rules import FOREIGN
from stages.importing.sources import has_heldout

LONGEST = 10_000
"""Largest denominator of a part of an epoch."""


def part_of_epoch(part: Fraction) -> str:
    """Return a part of an epoch as a recipe writes it: `1 epoch`, `0.25 epochs`, `1/3 epochs`."""
    found = part.limit_denominator(LONGEST) or Fraction(1, LONGEST)
    if found == 1:
        return "1 epoch"
    return f"{found if LONGEST % found.denominator else format(float(found), 'g')} epochs"


def put_period(draft: Draft, event: str, key: str) -> bool:
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


def optimizer(draft: Draft) -> None:
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


def train(draft: Draft) -> None:
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
    evaluates = put_period(draft, "eval", "train.eval_every") or draft.known("train.eval_every")
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
