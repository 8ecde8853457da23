"""The slot `optimizer`: the rule, its numbers, and the schedule."""

from __future__ import annotations

from pipeline.importing.translator import Request
from stages.importing.account import Account, Draft

BATCH = ("global_batch", "per_device", "accumulation", "procs")
BY_STEPS = "is counted in steps"


def train(draft: Draft, request: Request) -> None:
    """Slot `train`, and `launch.procs`."""
    account = draft.account
    draft.slot("train", "train.causal_lm")
    _length(draft)
    _batch(draft, _processes(draft, request))
    draft.copy("shuffle", "train.shuffle")
    draft.copy("workers", "train.workers")
    draft.copy("log_every", "train.log_every")
    strategy = account.value("eval_strategy")
    if strategy == "steps":
        every = account.value("eval_steps") or account.value("log_every", 500)
        draft.put("train.eval_every", every, "eval_strategy", "eval_steps")
        if not any(field.startswith("heldout") for field in draft.slots["data"]):
            draft.lacks("data.heldout_fraction", "a part to evaluate on, or heldout_files")
    elif strategy == "epoch":
        hint = "set train.eval_every"
        account.refuse("eval_strategy", f"evaluation {BY_STEPS}", hint)
    account.dismiss("eval_strategy", "held-out samples, if there are any, are the last step's")
    account.dismiss("eval_steps", "eval_strategy is not steps")


def _length(draft: Draft) -> None:
    account = draft.account
    planned = account.value("schedule_steps")
    if account.given("steps"):
        draft.copy("steps", "train.steps")
        account.dismiss("epochs", "max_steps counts")
    elif planned is not None and not account.given("epochs"):
        account.assumed.pop("epochs", None)
        draft.put("train.steps", planned, "schedule_steps")
    elif account.says("epochs"):
        draft.copy("epochs", "train.epochs")
    else:
        draft.lacks("train.steps", "how long to train, or `epochs`")
    ends = "the schedule ends with the training"
    agrees = account.given("steps") and account.value("steps") == planned
    if planned is None or agrees:
        account.dismiss("schedule_steps", ends)
    elif "steps" not in draft.slots["train"] or account.given("steps"):
        account.refuse("schedule_steps", ends, "train as long as the schedule")


def _processes(draft: Draft, request: Request) -> int | None:
    """As the person or a file says; else as batch sizes imply."""
    account = draft.account
    if request.procs is not None:
        draft.put("launch.procs", request.procs)
        if account.value("procs", request.procs) != request.procs:
            account.dismiss("procs", "--procs says it")
        else:
            draft.put("launch.procs", request.procs, "procs")
        return request.procs
    if account.value("distributed") == "one":
        account.assume("procs", 1, "distributed_type is NO")
    if account.says("procs"):
        draft.copy("procs", "launch.procs")
        found: int = account.value("procs")
        return found
    sizes = [account.value(fact) for fact in BATCH[:3] if account.given(fact)]
    if len(sizes) == 3 and None not in sizes and sizes[0] % (sizes[1] * sizes[2]) == 0:
        implied: int = sizes[0] // (sizes[1] * sizes[2])
        draft.put("launch.procs", implied, *BATCH[:3])
        return implied
    return None


def _batch(draft: Draft, procs: int | None) -> None:
    account = draft.account
    total, micro = account.value("global_batch"), account.value("per_device")
    accumulation = account.value("accumulation")
    implied = micro * (accumulation or 1) * procs if micro and procs else None
    if total is not None and implied not in (None, total) and account.given("accumulation"):
        account.refuse(
            "global_batch",
            f"is not {micro} a process x {accumulation} micro-batches x {procs} processes",
            "say the number of processes with --procs",
            blocks=True,
        )
    if total is not None or implied is not None:
        draft.put("train.global_batch_size", total or implied, *BATCH)
        draft.copy("per_device", "train.micro_batch_size")
    else:
        what = "samples in one step over all processes; --procs tells their number"
        draft.lacks("train.global_batch_size", what)
        draft.copy("per_device", "train.micro_batch_size")
        if accumulation is not None:
            draft.copy("accumulation", "train.accumulation")
    account.dismiss("global_batch", "auto: follows from the others")


def checkpoint(draft: Draft) -> None:
    """Slot `checkpoint`."""
    account = draft.account
    draft.slot("checkpoint", "checkpoint.sharded")
    strategy = account.value("save_strategy")
    if strategy == "steps":
        draft.put("checkpoint.every", account.value("save_steps"), "save_strategy", "save_steps")
    elif strategy in ("epoch", "best"):
        account.refuse("save_strategy", f"saving {BY_STEPS}", "set checkpoint.every")
    account.dismiss("save_strategy", "a checkpoint is saved at the end")
    account.dismiss("save_steps", "save_strategy is not steps")
    draft.copy("keep", "checkpoint.keep")
    draft.copy("keep_best", "checkpoint.keep_best")
    for entry in account.of("keep_best"):
        entry.why = "the best is kept; the last is exported: pipe export RUN --step best"


def publish(draft: Draft) -> None:
    """Slot `publish`, if the files ask for one."""
    account = draft.account
    repo = account.value("publish.repo")
    facts = ("publish", "publish.repo", "publish.private", "publish.revision")
    if not account.given("publish"):
        for fact in facts:
            account.dismiss(fact, "push_to_hub is off")
        return
    if repo is None or repo.count("/") != 1:
        why = "a repository is called owner/name"
        for fact in facts:
            account.refuse(fact, why, "add a slot publish: {use: publish.hub, repo: owner/name}")
        return
    draft.slot("publish", "publish.hub")
    draft.put("publish.use", "publish.hub", "publish")
    for fact in facts[1:]:
        draft.copy(fact, fact)


def optimizer(draft: Draft) -> None:
    """Slot `optimizer`."""
    account = draft.account
    _rule(draft)
    if account.says("lr"):
        draft.copy("lr", "optimizer.lr")
    else:
        draft.lacks("optimizer.lr", "the learning rate, which the files do not say")
    _betas(draft)
    draft.copy("weight_decay", "optimizer.weight_decay")
    draft.copy("decay_all", "optimizer.decay_all")
    _schedule(draft)
    draft.copy("max_grad_norm", "optimizer.max_grad_norm", lambda norm: norm or None)


def _rule(draft: Draft) -> None:
    """Which rule, how it is computed, and what is particular to it."""
    account = draft.account
    fields = {"use": "optimizer.adamw", **account.value("optim", {})}
    if account.given("optimizer"):
        if fields["use"] != "optimizer.adamw":
            account.refuse("optim", "DeepSpeed's optimizer wins, as it does in transformers")
        fields["use"] = "optimizer.adamw"
    draft.slot("optimizer", fields["use"])
    draft.put("optimizer.use", fields["use"], "optimizer")
    for name, value in fields.items():
        draft.put(f"optimizer.{name}", value, "optim")
    if fields["use"] == "optimizer.lion":
        for fact, value in (("beta1", 0.9), ("beta2", 0.999)):
            account.assume(fact, value, "transformers' default")
        account.dismiss("eps", "Lion divides by nothing")
    else:
        draft.copy("eps", "optimizer.eps")


def _betas(draft: Draft) -> None:
    account = draft.account
    single = [account.value("beta1", 0.9), account.value("beta2", 0.999)]
    stated = account.stated("betas")
    if stated is None and any(account.says(fact) for fact in ("betas", "beta1", "beta2")):
        draft.put("optimizer.betas", single, "betas", "beta1", "beta2")
    elif stated is not None:
        draft.put("optimizer.betas", stated, "betas")
        for fact, one, other in zip(("beta1", "beta2"), single, stated, strict=True):
            if account.given(fact) and one != other:
                hint = "say the same in both"
                account.refuse(fact, "contradicts DeepSpeed's betas", hint, blocks=True)
            account.dismiss(fact, "is in DeepSpeed's betas")


def _schedule(draft: Draft) -> None:
    account = draft.account
    wanted = _wanted(account)
    flat = wanted == "flat"
    if wanted:
        draft.put(
            "optimizer.schedule", "constant" if flat else wanted, "deepspeed.schedule", "schedule"
        )
    elif account.given("schedule_steps"):
        account.refuse("schedule_steps", "there is no schedule")
    if flat:
        account.dismiss("warmup_steps", "a constant schedule has no warm-up")
        account.dismiss("warmup_ratio", "a constant schedule has no warm-up")
    elif account.value("warmup_steps"):
        draft.copy("warmup_steps", "optimizer.warmup_steps")
        account.dismiss("warmup_ratio", "warmup_steps counts")
    elif account.value("warmup_ratio"):
        ratio = account.value("warmup_ratio")
        draft.put("optimizer.warmup_ratio", ratio, "warmup_ratio", "warmup_steps")
    _polynomial(draft, wanted)
    _decay(draft, wanted)
    account.dismiss("warmup_steps", "there is no warm-up")
    account.dismiss("warmup_ratio", "there is no warm-up")
    _final_rate(draft)


def _wanted(account: Account) -> str | None:
    """The schedule."""
    wanted = account.value("deepspeed.schedule") or account.value("schedule")
    if account.given("deepspeed.schedule") and account.value("schedule", wanted) != wanted:
        account.refuse("schedule", "DeepSpeed's scheduler wins, as it does in transformers")
    if wanted == "inverse_sqrt" and not (
        account.value("warmup_steps") or account.value("warmup_ratio")
    ):
        account.refuse(
            "schedule", "without warm-up it begins as behind 10,000 steps", "set warmup_steps"
        )
        return None
    if wanted == "wsd" and not account.says("decay_steps"):
        account.refuse("schedule", "needs num_decay_steps", "set it in lr_scheduler_kwargs")
        return None
    return str(wanted) if wanted else None


def _polynomial(draft: Draft, wanted: str | None) -> None:
    """transformers' falls along a line to nearly nothing, unless told otherwise."""
    account = draft.account
    if wanted == "polynomial":
        account.assume("power", 1.0, "transformers' default")
        account.assume("final_lr", 1e-7, "transformers' default")
        draft.copy("power", "optimizer.power")
    account.dismiss("power", "belongs to schedule polynomial")


def _decay(draft: Draft, wanted: str | None) -> None:
    """transformers' warm-up, stable, decay falls along a cosine, unless told otherwise, and rises
    from where it ends."""
    account = draft.account
    if wanted == "wsd":
        account.assume("decay_shape", "cosine", "transformers' default")
        _decay_steps(draft)
        draft.copy("decay_shape", "optimizer.decay_shape")
        warms_up = account.value("warmup_steps") or account.value("warmup_ratio")
        if account.value("wsd.final_lr_ratio") and warms_up:
            account.refuse("wsd.final_lr_ratio", "warm-up begins with rate 0", "leave one out")
        else:
            draft.copy("wsd.final_lr_ratio", "optimizer.final_lr_ratio")
    for fact in ("decay_steps", "decay_shape", "wsd.final_lr_ratio"):
        account.dismiss(fact, "belongs to schedule warmup_stable_decay")


def _decay_steps(draft: Draft) -> None:
    account = draft.account
    steps = account.value("steps")
    if steps and account.value("warmup_steps", 0) + account.value("decay_steps") > steps:
        why = "is more than warm-up leaves, where transformers' rate jumps"
        account.refuse("decay_steps", why, "lower num_decay_steps")
    else:
        draft.copy("decay_steps", "optimizer.decay_steps")


def _final_rate(draft: Draft) -> None:
    account = draft.account
    draft.copy("final_lr_ratio", "optimizer.final_lr_ratio")
    if account.says("final_lr") and not account.value("lr"):
        account.refuse("final_lr", "there is no learning rate that it is a part of")
    elif account.says("final_lr"):
        ratio = account.value("final_lr") / account.value("lr")
        draft.put("optimizer.final_lr_ratio", ratio, "final_lr")
