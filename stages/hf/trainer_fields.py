"""Fields of train.hf_trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline import UpdateRule
from stages.batches.settings import BatchPlan, Count


@dataclass(frozen=True, kw_only=True)
class TrainerFields(BatchPlan):
    """Batches of a training by transformers' Trainer, its evaluations, checkpoints, arguments."""

    log_every: Count = 10
    """Steps between two lines on screen; the first step has one too, and a step after 30 s without
    any. `metrics.jsonl` has every step."""

    eval_every: Count | None = None
    """Steps between evaluations on held-out samples; null evaluates at the end only."""

    save_every: Count | None = None
    """Steps between checkpoints; null saves at the end only."""

    keep: Count | None = 2
    """Newest checkpoints to keep; null keeps all."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further TrainingArguments, named as in transformers (`activation_checkpointing`,
    `torch_compile`). Arguments that a field above or another slot decides are refused; trackers are
    slots (`track.wandb`)."""


def several_rules(rules: Sequence[UpdateRule]) -> Iterator[tuple[str, str]]:
    """Message and hint where there is more than one rule."""
    if len(rules) > 1:
        named = ", ".join(rule.algorithm for rule in rules)
        message = f"the Trainer takes one optimizer, the optimizer slot asks for {named}"
        yield message, "use train.causal_lm, or another optimizer"
