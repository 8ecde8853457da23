"""The slot `optimizer`: the rule, its numbers, and the schedule."""

from __future__ import annotations

from stages.importing.account import Account
from stages.importing.draft import Draft


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
