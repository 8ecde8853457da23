"""The slots for training, checkpoints and publishing, and the number of processes."""

from __future__ import annotations

from pipeline.importing.translator import Request
from stages.importing.draft import Draft

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
