"""From facts to the recipe's slots, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.importing.translator import Request
from stages.importing.account import Account, Draft
from stages.importing.sources import adapter, data, model
from stages.importing.strategy import wrap
from stages.importing.training import checkpoint, optimizer, publish, train

NOT_FP16 = "fp16 is not what is computed in"


def compose(account: Account, request: Request, name: str) -> Draft:
    """The recipe that the facts make, called `name` if they do not say it."""
    draft = Draft(account)
    _head(draft, name)
    model(draft, request)
    adapter(draft)
    _precision(draft)
    data(draft, request)
    optimizer(draft)
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
