"""The slots for the optimizer, the training loop and checkpoints."""

from __future__ import annotations

from pipeline.importing import Request
from stages.importing.report import Draft, Report


def optimizer(draft: Draft) -> None:
    """Fill the slot `optimizer`."""
    report = draft.report
    fields = {"use": "optimizer.adamw", **report.value("optim", {})}
    if report.given("optimizer") and fields["use"] != "optimizer.adamw":
        report.refuse("optim", why="DeepSpeed's optimizer wins, as it does in transformers")
        fields = {"use": "optimizer.adamw"}
    draft.slot("optimizer", fields["use"], "optimizer")
    for name, value in fields.items():
        draft.put(f"optimizer.{name}", value, "optim")
    if fields["use"] == "optimizer.lion":
        for fact, value in (("beta1", 0.9), ("beta2", 0.999)):
            report.default(fact, value, "transformers' default")
        report.ignore("optimizer.eps", why="Lion has no epsilon")
    if not report.known("optimizer.lr"):
        draft.lacks("optimizer.lr", "the learning rate, which the files do not give")
    _betas(draft)
    _schedule(draft)


def _betas(draft: Draft) -> None:
    report = draft.report
    single = [report.value("beta1", 0.9), report.value("beta2", 0.999)]
    stated = next((entry.content for entry in report.of("betas") if not entry.auto), None)
    if stated is None and any(map(report.known, ("betas", "beta1", "beta2"))):
        draft.put("optimizer.betas", single, "betas", "beta1", "beta2")
    elif stated is not None:
        draft.put("optimizer.betas", stated, "betas")
        for fact, one, other in zip(("beta1", "beta2"), single, stated, strict=True):
            if one == other:
                report.ignore(fact, why="is in DeepSpeed's betas")
            hint = "use the same value in both"
            report.refuse(fact, why="contradicts DeepSpeed's betas", hint=hint, blocks=True)


def _schedule(draft: Draft) -> None:
    report = draft.report
    schedule = _shape(report)
    steps, ratio = report.value("warmup_steps"), report.value("warmup_ratio")
    if schedule is not None:
        shape = "constant" if schedule == "flat" else schedule
        draft.put("optimizer.schedule", shape, "deepspeed.schedule", "schedule")
    if steps and schedule != "flat":
        draft.copy("warmup_steps", "optimizer.warmup_steps")
    elif ratio and schedule != "flat":
        draft.put("optimizer.warmup_ratio", ratio, "warmup_ratio", "warmup_steps")
    if schedule == "polynomial":
        report.default("optimizer.power", 1.0, "transformers' default")
        report.default("final_lr", 1e-7, "transformers' default")
    else:
        report.ignore("optimizer.power")
    if schedule == "wsd":
        _decay(report, warms_up=bool(steps or ratio))
        draft.copy("wsd.final_lr_ratio", "optimizer.final_lr_ratio")
    else:
        report.ignore("optimizer.decay_steps", "optimizer.decay_shape", "wsd.final_lr_ratio")
    if report.known("final_lr") and report.value("optimizer.lr"):
        final = report.value("final_lr") / report.value("optimizer.lr")
        draft.put("optimizer.final_lr_ratio", final, "final_lr")


def _shape(report: Report) -> str | None:
    """Return the schedule, `flat` for constant without warm-up."""
    schedule = report.value("deepspeed.schedule") or report.value("schedule")
    if report.given("deepspeed.schedule") and report.value("schedule", schedule) != schedule:
        report.refuse("schedule", why="DeepSpeed's scheduler wins, as it does in transformers")
    warms_up = report.value("warmup_steps") or report.value("warmup_ratio")
    if schedule == "inverse_sqrt" and not warms_up:
        why = "without warm-up it starts as if 10,000 steps had passed"
        report.refuse("schedule", why=why, hint="set warmup_steps")
        return None
    if schedule == "wsd" and not report.known("optimizer.decay_steps"):
        hint = "set it in lr_scheduler_kwargs"
        report.refuse("schedule", why="needs num_decay_steps", hint=hint)
        return None
    return str(schedule) if schedule else None


def _decay(report: Report, *, warms_up: bool) -> None:
    """Set the decay of transformers' warmup_stable_decay, by default along a cosine."""
    report.default("optimizer.decay_shape", "cosine", "transformers' default")
    steps = report.value("train.steps")
    warmup, decay = report.value("warmup_steps", 0), report.value("optimizer.decay_steps")
    if steps and warmup + decay > steps:
        why = "is more than warm-up leaves, where transformers' rate jumps"
        report.refuse("optimizer.decay_steps", why=why, hint="lower num_decay_steps")
    if report.value("wsd.final_lr_ratio") and warms_up:
        why = "warm-up begins with rate 0"
        report.refuse("wsd.final_lr_ratio", why=why, hint="leave one out")


def checkpoint(draft: Draft) -> None:
    """Fill the slot `checkpoint`."""
    report = draft.report
    draft.slot("checkpoint", "checkpoint.sharded")
    if report.value("save_strategy") == "steps":
        every = report.value("save_steps")
        draft.put("checkpoint.every", every, "save_strategy", "save_steps")


def train(draft: Draft, request: Request) -> None:
    """Fill the slot `train`, and `launch.procs`."""
    report = draft.report
    draft.slot("train", "train.causal_lm")
    _length(draft)
    _batch(draft, _processes(draft, request))
    if report.value("eval_strategy") == "steps":
        every = report.value("eval_steps") or report.value("train.log_every", 500)
        draft.put("train.eval_every", every, "eval_strategy", "eval_steps")
        if not any(name.startswith("heldout") for name in draft.slots["data"]):
            draft.lacks("data.heldout_fraction", "a part to evaluate on, or heldout_files")


def _length(draft: Draft) -> None:
    report = draft.report
    planned = report.value("schedule_steps")
    if report.given("train.steps"):
        report.ignore("train.epochs", why="max_steps counts")
    elif planned is not None and not report.given("train.epochs"):
        report.ignore("train.epochs")
        draft.put("train.steps", planned, "schedule_steps")
        return
    elif not report.known("train.epochs"):
        draft.lacks("train.steps", "how long to train, or `epochs`")
    if planned != report.value("train.steps", planned if planned is None else -1):
        why = "the schedule ends with the training"
        report.refuse("schedule_steps", why=why, hint="train as long as the schedule")


BATCH = ("global_batch", "train.micro_batch_size", "accumulation", "procs")


def _processes(draft: Draft, request: Request) -> int | None:
    """Return the number of processes: as requested, as a file gives it, or as batch sizes imply."""
    report = draft.report
    if request.procs is not None:
        if report.value("procs", request.procs) != request.procs:
            report.ignore("procs", why="--procs replaces it")
        draft.put("launch.procs", request.procs, "procs")
        return request.procs
    if report.value("distributed") == "one":
        report.default("procs", 1, "distributed_type is NO")
    draft.copy("procs", "launch.procs")
    found: int | None = report.value("procs")
    sizes = [report.value(fact) for fact in BATCH[:3] if report.given(fact)]
    if found is None and len(sizes) == 3 and None not in sizes:
        found, rest = divmod(sizes[0], sizes[1] * sizes[2])
        if rest:
            return None
        draft.put("launch.procs", found, *BATCH[:3])
    return found


def _batch(draft: Draft, procs: int | None) -> None:
    report = draft.report
    total, micro, accumulation = (report.value(fact) for fact in BATCH[:3])
    implied = micro * (accumulation or 1) * procs if micro and procs else None
    if None not in (total, implied) and total != implied and report.given("accumulation"):
        why = f"is not {micro} a process x {accumulation} micro-batches x {procs} processes"
        hint = "give the number of processes with --procs"
        report.refuse("global_batch", why=why, hint=hint, blocks=True)
    if total is not None or implied is not None:
        draft.put("train.global_batch_size", total or implied, *BATCH)
        return
    what = "samples in one step over all processes; --procs gives their number"
    draft.lacks("train.global_batch_size", what)
    draft.copy("accumulation", "train.accumulation")
