"""Rules that the recipes of several tools share."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from stages.importing import rules
from stages.importing.periods import part_of_epoch
from stages.importing.rules import Rule, RuleResult, Table, refused, sets
from stages.importing.trackers import other_tracker

OWN_TEMPLATE = "rows are laid out by the tokenizer's own chat template"
USE_TEMPLATE = "compare both; for another template, name a tokenizer that has it: model.tokenizer"
template_setting = rules.unsupported(OWN_TEMPLATE, USE_TEMPLATE)
SWANLAB: Table = rules.each_way(
    "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_experiment_name "
    "swanlab_description swanlab_mode swanlab_logdir swanlab_lark_webhook_url "
    "swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer",
    other_tracker,
)
TOKENS = "tokens come from the model's tokenizer"
new_tokens = rules.unsupported(
    TOKENS, "save a tokenizer with them, name it in model.tokenizer, and set model.vocab_size"
)
MASKS = "rows of one sample never see each other"

LORA_PLUS: Table = {
    "loraplus_lr_ratio": sets(
        "optimizer.groups",
        lambda value: [{"match": ["*.lora_B.*"], "lr_ratio": rules.number(value)}],
    ),
    "loraplus_lr_embedding": rules.passes("no embedding has an adapter"),
}


def named_template(value: Any) -> RuleResult:
    """Refuse a chat template by name, unless it is the tokenizer's own."""
    if str(value).lower() in ("none", "tokenizer_default"):
        return RuleResult(outcome="default", why=OWN_TEMPLATE)
    return refused(OWN_TEMPLATE, USE_TEMPLATE)


def _fraction(value: Any) -> float:
    found = rules.number(value)
    if not 0 < found <= 0.5:
        why = f"holds out {value!r}, and a recipe a share of the rows of at most 0.5"
        raise rules.WrongValueError(why, "set data.heldout_fraction")
    return found


held_out = sets("data.heldout_fraction", _fraction, off=(0, "0", "0.0"))
"""Rule for the share of the rows that is held out, of at most a half; 0 means none."""


def each_epoch(fact: str) -> Rule:
    """Return a rule for a number of events an epoch."""
    return sets(fact, lambda value: part_of_epoch(Fraction(1, rules.positive(value))), off=(0,))
