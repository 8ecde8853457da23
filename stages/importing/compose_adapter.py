"""The slot `adapter`: what TRL's scripts say of LoRA and of weights in 4 bits."""

from __future__ import annotations

from stages.importing.draft import Draft

DEFAULTS = {"adapter.rank": 16, "adapter.alpha": 32.0, "adapter.dropout": 0.05}
BY_ARCHITECTURE = "ends of layers' names, or all-linear; peft chose by the architecture"


def adapter(draft: Draft) -> None:
    """Slot `adapter`, if there is one."""
    account = draft.account
    if account.value("adapter"):
        _lora(draft)
    elif account.given("adapter.four_bits"):
        account.refuse(
            "adapter.four_bits", "weights that are trained are not held in 4 bits", "set use_peft"
        )
    account.dismiss("adapter", "is off")
    for fact in [f"adapter.{name}" for name in account.facts("adapter.")]:
        if account.given("adapter"):
            account.dismiss(fact, "is not read")
        elif fact != "adapter.four_bits":
            hint = "say which with use_peft: true or false"
            account.refuse(fact, "means LoRA, or nothing without use_peft", hint, blocks=True)


def _lora(draft: Draft) -> None:
    account = draft.account
    draft.slot("adapter", "adapter.lora")
    draft.put("adapter.use", "adapter.lora", "adapter")
    for fact, value in DEFAULTS.items():
        account.assume(fact, value, "TRL's default")
        draft.copy(fact, fact)
    if account.given("adapter.targets"):
        draft.copy("adapter.targets", "adapter.targets", _all)
    else:
        draft.lacks("adapter.targets", BY_ARCHITECTURE)
    draft.copy("adapter.rslora", "adapter.scaling", lambda on: "rslora")
    draft.copy("adapter.dora", "adapter.dora", bool)
    draft.copy(
        "adapter.modules", "adapter.train_also", lambda names: [f"*{name}.*" for name in names]
    )
    if account.given("adapter.four_bits"):
        kind = account.value("adapter.kind", "nf4")
        draft.put("adapter.quantize", kind, "adapter.four_bits", "adapter.kind")


def _all(names: list[str]) -> list[str] | str:
    return "all-linear" if names == ["all-linear"] else names
