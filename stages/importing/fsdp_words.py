"""The key `fsdp` of TrainingArguments and axolotl: words, as a text or a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.importing.report import Report
from stages.importing.rules import WrongValueError

WORDS: Mapping[str, Mapping[str, Any]] = {
    "auto_wrap": {},
    "full_shard": {},
    "true": {},
    "shard_grad_op": {"fsdp.sharding": "shard_grad_op"},
    "hybrid_shard": {"fsdp.sharding": "hybrid_shard"},
    "offload": {"fsdp.cpu_offload": True},
}  # fmt: skip
"""Words of the key `fsdp` -> facts that they give besides the strategy."""


def fsdp_words(value: Any) -> list[str]:
    """Return the words of the key `fsdp`: a list, or a text with spaces."""
    found = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return [str(each).lower() for each in found]


def fsdp_strategy(value: Any) -> str:
    """Return the stage for the words of the key `fsdp`. Raises WrongValueError for unknown ones."""
    if unknown := [word for word in fsdp_words(value) if word not in WORDS]:
        hint = "set fsdp: true, and fsdp_config"
        raise WrongValueError(f"{unknown[0]!r} is not a known word", hint, blocks=True)
    return "wrap.fsdp"


def set_words(report: Report, value: Any) -> None:
    """Add what the words of the key `fsdp` say; keys of fsdp_config win over them."""
    for word in fsdp_words(value):
        for fact, content in WORDS.get(word, {}).items():
            report.default(fact, content, f"{word} in fsdp")
