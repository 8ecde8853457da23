"""Files of accelerate, DeepSpeed and transformers, read into one draft."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from pipeline.importing import ConfigFile
from stages.importing import rules
from stages.importing.draft import Draft
from stages.importing.recipe import ASKED, TRACKERS
from stages.importing.rules import Rule, RuleResult, is_off, number, outcome, why

ACCELERATE_KIND = "accelerate config"
DEEPSPEED_KIND = "DeepSpeed configuration"
TRAINER_KIND = "transformers TrainingArguments"
OTHER_METHOD = re.compile(
    r"^(?!.*sft).*(^|[^a-z])(dpo|ipo|kto|orpo|cpo|simpo|apo|ppo|grpo|rloo|rlhf|reward)([^a-z]|$)"
)
"""Names of trainings that TRL's scripts share their keys with. A name with `sft` is of one on text:
`sft-for-grpo`."""


def report_to(value: Any) -> RuleResult:
    named = [] if is_off(value) else [each.lower() for each in rules.names(value)]
    if "all" in named:
        return outcome(why("every_tracker"))
    ours = [each for each in TRACKERS if each in named]
    others = [each for each in named if each not in (*TRACKERS, "none")]
    fact: dict[str, Any] = {"fact": ASKED, "content": ours} if ours else {}
    if others:
        return outcome(why("other_trackers", ", ".join(others)), **fact)
    return RuleResult(**fact) if ours else outcome(why("off"))


def warmup(value: Any) -> RuleResult:
    """Read a number of steps, or below 1 their share."""
    share = 0 < number(value) < 1
    return Rule("warmup_ratio number" if share else "warmup_steps whole")(value)


def steps_or_share(value: Any) -> int | Fraction:
    """Return a number of steps, or below 1 the share of the training that is meant."""
    found = number(value)
    return Fraction(str(found)) if 0 < found < 1 else rules.positive(value)


def targets(value: Any) -> list[str] | str:
    """Return the layers of an adapter. Raises WrongValueError for a pattern of their names."""
    if isinstance(value, str) and set(value) & set(r"\[](){}|^$*+?"):
        raise rules.WrongValueError(why("pattern_of_layers"))
    found = rules.names(value)
    return "all-linear" if found == ["all-linear"] else found


def fraction(value: Any) -> float:
    """Return the share of the rows that is held out."""
    found = number(value)
    if not 0 < found <= 0.5:
        raise rules.WrongValueError(why("wrong_fraction", value))
    return found


rules.load("words")
TABLES = rules.load(
    "hugging_face", report_to, warmup, steps_or_share, targets, fraction,
    any=lambda value: value,
    flag=lambda value: int(rules.truth(value)),
    # A bucket of one element is sent after every tensor, and so is a bucket of none.
    count=lambda value: max(rules.whole(value), 1),
    scales={str(power): float(2**power) for power in range(33)},
    also=lambda value: [f"*{name}.*" for name in rules.names(value)],
    one_file=lambda value: [rules.path(value)],
    percentage=lambda value: min(number(value) / 100, 0.5),
    lora_b=lambda value: [{"match": ["*.lora_B.*"], "lr_ratio": number(value)}],
)  # fmt: skip
KINDS = {TRAINER_KIND: "script", ACCELERATE_KIND: "accelerate", DEEPSPEED_KIND: "deepspeed"}
"""Kinds of files, in the order in which they are read -> name of the table."""


def read_all(draft: Draft, files: Sequence[tuple[str | None, ConfigFile]]) -> None:
    """Read the files of each kind, with DeepSpeed's defaults."""
    for kind, file in ((kind, file) for kind in KINDS for known, file in files if known == kind):
        draft.kinds.add(kind)
        table, content = {**TABLES[KINDS[kind]]}, file.content
        if kind == ACCELERATE_KIND:
            # `accelerate launch` does not read the keys of another strategy; one key names a file.
            named = {"deepspeed_config_file": _named(draft, file, None, "", "none")}
            table["deepspeed_config"] = {**table["deepspeed_config"], **named}
            used = str(content.get("distributed_type", "NO")).upper()
            for key, engine in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
                other = content.get(key) and used != engine
                table |= unread((key, other, f"distributed_type is {used}"))
        elif kind == TRAINER_KIND:
            table |= _script(draft, file)
        draft.read(file.path.name, content, table)
    if DEEPSPEED_KIND in draft.kinds:
        _set_engine_defaults(draft)


def unread(*keys: tuple[str, Any, str]) -> dict[str, Any]:
    """Return rules for keys that their tool does not read in the company of others: the key,
    whether that is so, and why."""
    return {key: Rule(why("unread", reason)) for key, holds, reason in keys if holds}


def purpose(content: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return a refusal of a file that asks for one of `others`, switches such as `do_predict`, and
    for no training."""
    asked = [key for key in others if not is_off(content.get(key))]
    refused = dict.fromkeys(asked[:1], TABLES["words"]["no_training"])
    return refused if is_off(content.get("do_train")) else {}


def _script(draft: Draft, file: ConfigFile) -> dict[str, Any]:
    """Set the defaults of a script of transformers or TRL, and return the rules of its file."""
    content = file.content
    if TABLES["sft"].keys() & content.keys():
        given = {key for key, value in content.items() if value is not None}
        given |= {"bf16"} if content.get("fp16") else set()
        draft.set_defaults("sft", TABLES["script"], "TRL's default", *given)
    # Scripts of TRL train without `do_train`, and with `do_eval`, which `eval_strategy` sets.
    evaluates = "do_train" in content and is_off(content.get("eval_strategy"))
    return {
        **purpose(content, "do_predict", "predict_with_generate", *["do_eval"] * evaluates),
        **{key: Rule(why("other_training", key)) for key in ("run_name", "output_dir")
           if OTHER_METHOD.search(Path(str(content.get(key, ""))).name.lower())},
        **trainer(draft, file),
    }  # fmt: skip


def trainer(draft: Draft, file: ConfigFile) -> dict[str, Any]:
    """Set the defaults of TrainingArguments, and return the rules of what they do not read."""
    draft.set_defaults("trainer", TABLES["script"], "transformers' default")
    fsdp, block = file.content.get("fsdp"), file.content.get("fsdp_config")
    set_words(draft, fsdp)
    alone = unread(("fsdp_config", block and not fsdp, "fsdp is not set"))
    return {**alone, **deepspeed(draft, file)}


def set_words(draft: Draft, value: Any) -> None:
    """Add what the words of the key `fsdp` say; keys of fsdp_config win over them."""
    for word in re.findall("offload|shard_grad_op|hybrid_shard", str(value).lower()):
        offload = word == "offload"
        fact, content = ("fsdp.cpu_offload", True) if offload else ("fsdp.sharding", word)
        draft.default(fact, content, f"{word} in fsdp")


def deepspeed(draft: Draft, file: ConfigFile) -> dict[str, Any]:
    """Return the rule of the key `deepspeed` if it names a file, or note that it is a block."""
    value = file.content.get("deepspeed")
    if isinstance(value, str):
        return {"deepspeed": _named(draft, file)}
    draft.kinds |= {DEEPSPEED_KIND} if value else set()
    return {}


def _named(draft: Draft, file: ConfigFile, *none: Any) -> Callable[[Any], RuleResult]:
    """Return the rule of a key that names another file, which must be given too, or is `none`."""
    files = {each.path.name for each in draft.files}
    return lambda value: outcome(
        why("off") if value in none
        else why("separate_file") if Path(str(value)).name in files
        else why("other_file", file.path, value)
    )  # fmt: skip


def _set_engine_defaults(draft: Draft) -> None:
    """Set the defaults of DeepSpeed 0.19."""
    own, alone = "DeepSpeed's default", TRAINER_KIND not in draft.kinds
    steps, scheduled = draft.given("optimizer"), draft.given("deepspeed.schedule")
    cosine = scheduled and draft.value("deepspeed.schedule") == "cosine"
    flat, scaled = alone and steps and not scheduled, draft.value("precision.compute") == "fp16"
    for fact, value, reason, holds in (
        ("optimizer.max_grad_norm", None, own, alone),
        ("optimizer.decay_all", True, "DeepSpeed decays every parameter", steps),
        ("optimizer.weight_decay", 0.0, own, steps),
        ("schedule", "flat", "DeepSpeed's default is a constant rate", flat),
        ("warmup_steps", 1000, own, scheduled),
        ("optimizer.final_lr_ratio", 1e-4, own, cosine),
        ("precision.loss_scale_growth_interval", 1000, own, scaled),
    ):
        draft.default(fact, value, reason, when=holds and not draft.given(fact))
