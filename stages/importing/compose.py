"""From facts to the recipe's slots, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.importing.translator import Request
from stages.importing.account import Account
from stages.importing.compose_sources import data, model
from stages.importing.compose_train import checkpoint, publish, train
from stages.importing.compose_wrap import wrap
from stages.importing.draft import Draft

NOT_FP16 = "fp16 is not what is computed in"


def compose(account: Account, request: Request, name: str) -> Draft:
    """The recipe that the facts make, called `name` if they do not say it."""
    draft = Draft(account)
    _head(draft, name)
    model(draft, request)
    _precision(draft)
    data(draft, request)
    _optimizer(draft)
    wrap(draft)
    checkpoint(draft)
    train(draft, request)
    draft.slot("consolidate", "consolidate.stream")
    draft.slot("export", "export.safetensors")
    publish(draft)
    return draft


def recipe(draft: Draft) -> Mapping[str, Any]:
    """The recipe's values."""
    launch = draft.header.pop("launch", None)
    head = {**draft.header, **({"launch": launch} if launch else {})}
    return {**head, "stages": draft.slots}


def _head(draft: Draft, name: str) -> None:
    account = draft.account
    draft.put("name", account.value("name") or account.value("output_name") or name)
    fact = "name" if account.given("name") else "output_name"
    draft.put("name", draft.header["name"], fact)
    account.dismiss("output_name", "runs are made below runs/ (--runs), called after run_name")
    draft.copy("seed", "seed")
    if account.value("data_seed") == account.value("seed"):
        account.dismiss("data_seed", "is that of everything")
    else:
        account.refuse("data_seed", "one seed is that of everything", "set it as seed")
    if account.value("device") == "cpu":
        draft.copy("device", "launch.device")
    account.dismiss("device", "the CPU is taken where there is no GPU")


def _precision(draft: Draft) -> None:
    account = draft.account
    draft.slot("precision", "precision.policy")
    account.assume("compute", "fp32", "no mixed precision is asked for")
    draft.copy("compute", "precision.compute")
    draft.copy("master", "precision.master")
    draft.copy("reduce", "precision.reduce")
    draft.copy("buffer", "precision.buffer")
    if account.value("compute") == "fp16":
        draft.copy("fp16.initial", "precision.initial_loss_scale")
        draft.copy("fp16.interval", "precision.loss_scale_growth_interval")
    account.dismiss("fp16.initial", NOT_FP16)
    account.dismiss("fp16.interval", NOT_FP16)


def _optimizer(draft: Draft) -> None:
    account = draft.account
    draft.slot("optimizer", "optimizer.adamw")
    draft.put("optimizer.use", "optimizer.adamw", "optimizer")
    if account.says("lr"):
        draft.copy("lr", "optimizer.lr")
    else:
        draft.lacks("optimizer.lr", "the learning rate, which the files do not say")
    _betas(draft)
    draft.copy("eps", "optimizer.eps")
    draft.copy("weight_decay", "optimizer.weight_decay")
    draft.copy("decay_all", "optimizer.decay_all")
    _schedule(draft)
    draft.copy("max_grad_norm", "optimizer.max_grad_norm", lambda norm: norm or None)
    draft.copy("kernel", "optimizer.kernel")


def _betas(draft: Draft) -> None:
    account = draft.account
    single = [account.value("beta1", 0.9), account.value("beta2", 0.999)]
    stated = account.stated("betas")
    if stated is None and any(account.given(fact) for fact in ("betas", "beta1", "beta2")):
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
    wanted = account.value("deepspeed.schedule") or account.value("schedule")
    if account.given("deepspeed.schedule") and account.value("schedule", wanted) != wanted:
        account.refuse("schedule", "DeepSpeed's scheduler wins, as it does in transformers")
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
    account.dismiss("warmup_steps", "there is no warm-up")
    account.dismiss("warmup_ratio", "there is no warm-up")
    _final_rate(draft)


def _final_rate(draft: Draft) -> None:
    account = draft.account
    draft.copy("final_lr_ratio", "optimizer.final_lr_ratio")
    if account.given("final_lr") and not account.value("lr"):
        account.refuse("final_lr", "there is no learning rate that it is a part of")
    elif account.given("final_lr"):
        ratio = account.value("final_lr") / account.value("lr")
        draft.put("optimizer.final_lr_ratio", ratio, "final_lr")
