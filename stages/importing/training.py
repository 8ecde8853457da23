"""The slots for the optimizer and the training loop."""

from __future__ import annotations

from pipeline.importing import Request
from stages.importing.engines import FOREIGN
from stages.importing.parallelism import AUTO, sharing_ranks, size
from stages.importing.periods import put_period
from stages.importing.report import Draft, Report
from stages.importing.sources import has_heldout


def optimizer(draft: Draft) -> None:
    """Fill the slot `optimizer`."""
    report = draft.report
    draft.slot("optimizer", "optimizer.adamw", "optimizer", "optim")
    for name, value in report.value("optim", {}).items():
        draft.put(f"optimizer.{name}", value, "optim")
    _foreign(draft)
    if not report.known("optimizer.lr"):
        draft.lacks("optimizer.lr", "the learning rate, which the files do not give")
    _betas(draft)
    _schedule(draft)


def _foreign(draft: Draft) -> None:
    """Leave out the rate of an optimizer that the recipe has not: AdamW's is another."""
    report = draft.report
    if report.of(FOREIGN):
        name = report.of(FOREIGN)[0].content
        hint = "fill in optimizer.lr, for the optimizer that you choose"
        report.refuse("optimizer.lr", why=f"is a rate for {name}, and this is AdamW", hint=hint)


def _betas(draft: Draft) -> None:
    report = draft.report
    single = [report.value("beta1", 0.9), report.value("beta2", 0.999)]
    stated = next((entry.content for entry in report.of("betas") if not entry.auto), None)
    if stated is not None:
        draft.put("optimizer.betas", stated, "betas")
        for fact, one, other in zip(("beta1", "beta2"), single, stated, strict=True):
            if one != other:
                hint = "use the same value in both"
                report.refuse(fact, why="contradicts DeepSpeed's betas", hint=hint, blocks=True)
    elif any(map(report.known, ("betas", "beta1", "beta2"))):
        draft.put("optimizer.betas", single, "betas", "beta1", "beta2")


def _schedule(draft: Draft) -> None:
    report = draft.report
    schedule = report.value("deepspeed.schedule") or report.value("schedule")
    if report.given("deepspeed.schedule") and report.value("schedule", schedule) != schedule:
        report.refuse("schedule", why="DeepSpeed's scheduler wins, as it does in transformers")
    if schedule is not None:
        shape = "constant" if schedule == "flat" else schedule
        draft.put("optimizer.schedule", shape, "deepspeed.schedule", "schedule")
    ratio = report.value("warmup_ratio")
    if schedule != "flat" and report.value("warmup_steps"):
        draft.copy("warmup_steps", "optimizer.warmup_steps")
    elif schedule != "flat" and ratio:
        draft.put("optimizer.warmup_ratio", ratio, "warmup_ratio", "warmup_steps")
    if report.known("final_lr") and report.value("optimizer.lr"):
        final = report.value("final_lr") / report.value("optimizer.lr")
        draft.put("optimizer.final_lr_ratio", final, "final_lr")


def train(draft: Draft, request: Request) -> None:
    """Fill the slot `train`, and `launch.procs`."""
    report = draft.report
    draft.slot("train", "train.causal_lm")
    _length(draft)
    _batch(draft, _processes(draft, request))
    evaluates = put_period(draft, "eval", "train.eval_every") or report.known("train.eval_every")
    if evaluates and not (report.facts("data.heldout") or has_heldout(draft)):
        draft.lacks("data.heldout_fraction", "a part to evaluate on, or heldout_files")
    if not evaluates:
        compared = report.facts("train.early_stopping") + report.facts("checkpoint.keep_best")
        why = "compares evaluations, and there are none before the end"
        report.refuse(*compared, why=why, hint="evaluate every so many steps, or epochs")


def _length(draft: Draft) -> None:
    report = draft.report
    planned = report.value("schedule_steps")
    if planned is not None and not (report.given("train.steps") or report.given("train.epochs")):
        draft.put("train.steps", planned, "schedule_steps")
        report.ignore("train.epochs")
        return
    if planned is not None and planned != report.value("train.steps"):
        why = "the schedule ends with the training"
        report.refuse("schedule_steps", why=why, hint="train as long as the schedule")
    if report.given("train.steps"):
        report.ignore("train.epochs", why="the number of steps counts")
    elif not report.known("train.epochs"):
        draft.lacks("train.steps", "how long to train, or `epochs`")


def _processes(draft: Draft, request: Request) -> int | None:
    """Return the number of processes, as requested or as a file gives it."""
    report = draft.report
    if request.procs is not None:
        report.ignore("procs", why="--procs replaces it")
        draft.put("launch.procs", request.procs)
        return request.procs
    if report.value("distributed") == "one":
        report.default("procs", 1, "distributed_type is NO")
    draft.copy("procs", "launch.procs")
    found: int | None = report.value("procs")
    return found


def _stated_batch(report: Report) -> int | None:
    """Return the global batch that a file states. DeepSpeed counts a sample once for each of the
    ranks that AutoTP gives it to."""
    total: int | None = report.value("global_batch")
    ranks = size(report, AUTO)
    if total is None or ranks == 1:
        return total
    if total % ranks:
        why = f"counts each sample for {ranks} ranks, which do not divide it"
        report.refuse("global_batch", why=why, blocks=True)
        return None
    return total // ranks


BATCH = ("global_batch", "train.micro_batch_size", "accumulation", "procs")


def _batch(draft: Draft, procs: int | None) -> None:
    report = draft.report
    total = _stated_batch(report)
    micro, accumulation = (report.value(fact) for fact in BATCH[1:3])
    sharing = sharing_ranks(report)
    implied = micro * (accumulation or 1) * procs // sharing if micro and procs else None
    if None not in (total, implied) and total != implied and report.given("accumulation"):
        shares = f" / {sharing} that share a sample" if sharing > 1 else ""
        why = f"is not {micro} a process x {accumulation} micro-batches x {procs} processes{shares}"
        hint = "give the number of processes with --procs"
        report.refuse("global_batch", why=why, hint=hint, blocks=True)
    if total is not None or implied is not None:
        draft.put("train.global_batch_size", total or implied, *BATCH)
        return
    what = "samples in one step over all processes; --procs sets their number"
    draft.lacks("train.global_batch_size", what)
    draft.copy("accumulation", "train.accumulation")
