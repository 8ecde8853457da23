"""Files of accelerate, DeepSpeed and transformers, read into one draft."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.importing import ConfigFile
from stages.importing.draft import BEGINNINGS, Draft
from stages.importing.engines import ACCELERATE, ACCELERATE_ENGINE, DEEPSPEED, set_words
from stages.importing.rules import Rule, RuleResult, Table, is_off, outcome, rows, rule, unset
from stages.importing.tools import tool_of
from stages.importing.trainer import DEFAULTS, SFT_DEFAULTS, SFT_KEYS, TRAINER_ALL

ACCELERATE_KIND = "accelerate config"
DEEPSPEED_KIND = "DeepSpeed configuration"
TRAINER_KIND = "transformers TrainingArguments"
TABLES: Mapping[str, Table] = {
    TRAINER_KIND: TRAINER_ALL, ACCELERATE_KIND: ACCELERATE, DEEPSPEED_KIND: DEEPSPEED,
}  # fmt: skip
"""Kinds of files, in the order in which they are read."""
OTHER_METHOD = re.compile(
    r"^(?!.*sft).*(^|[^a-z])(dpo|ipo|kto|orpo|cpo|simpo|apo|ppo|grpo|rloo|rlhf|reward)([^a-z]|$)"
)
"""Names of trainings that TRL's scripts share their keys with. A name with `sft` is of one on text:
`sft-for-grpo`."""
COMMON = frozenset(rows("""
    bf16 dtype fp16 gradient_checkpointing learning_rate lora_alpha lora_dropout lora_r
    max_grad_norm max_length max_steps packing project run_name seed tf32 trust_remote_code
    warmup_ratio warmup_steps weight_decay: common
"""))  # fmt: skip
"""Keys that files of many tools have, which identify none."""


def kind_of(content: Mapping[str, Any]) -> str | None:
    """Return the kind that most keys belong to, of those that have a key to themselves; None for
    files of other tools."""
    if tool_of(content) is not None:
        return None
    known = {kind: _known(content, table) for kind, table in TABLES.items()}
    shared = Counter(key for keys in known.values() for key in keys)
    telling = {
        key
        for key in content
        if shared[key] == 1 and (key not in COMMON or isinstance(content[key], Mapping))
    }
    own = [kind for kind, keys in known.items() if not telling.isdisjoint(keys)]
    best = max(own, key=lambda kind: len(known[kind]), default=None)
    others = sum(key.startswith((*BEGINNINGS,)) for key in content)
    return best if best and 2 * (len(known[best]) + others) >= len(content) else None


def _known(content: Mapping[str, Any], table: Table) -> list[str]:
    """Return the keys that the table could have: blocks where it has blocks, values elsewhere."""
    return [
        key
        for key, value in content.items()
        if key in table and (isinstance(value, Mapping) != callable(table[key]) or not value)
    ]


def read(draft: Draft, file: ConfigFile, kind: str) -> None:
    """Read a file of a known kind."""
    draft.kinds.add(kind)
    own: Table = {}
    if kind == ACCELERATE_KIND:
        # `accelerate launch` does not read the keys of another strategy; one key names a file.
        used = str(file.content.get("distributed_type", "NO")).upper()
        engines = (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP"))
        named = {"deepspeed_config_file": _named(draft, file, None, "", "none")}
        own = {"deepspeed_config": {**ACCELERATE_ENGINE, **named}} | unread(
            *((key, file.content.get(key) and used != engine, f"distributed_type is {used}")
              for key, engine in engines)
        )  # fmt: skip
    elif kind == TRAINER_KIND:
        own = _script(draft, file)
    draft.read(file.path.name, file.content, {**TABLES[kind], **own})


def unread(*keys: tuple[str, Any, str]) -> dict[str, Any]:
    """Return rules for keys that their tool does not read in the company of others. A row has the
    key, whether that is so, and why."""
    return {key: rule(f"ignored is not read: {why}") for key, holds, why in keys if holds}


def purpose(content: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return a refusal of a file that asks for one of `others`, switches such as `do_predict`, and
    for no training."""
    asked = [key for key in others if not is_off(content.get(key))]
    return dict.fromkeys(asked[:1], NO_TRAINING) if is_off(content.get("do_train")) else {}


NO_TRAINING = rule(
    "refused is not training, the only thing a recipe does "
    "!! set do_train: true, or evaluate with a slot evaluate: {use: evaluate.lm}"
)


def _script(draft: Draft, file: ConfigFile) -> Table:
    """Set the defaults of a script of transformers or TRL, and return the rules of its file."""
    content = file.content
    if SFT_KEYS & content.keys():
        given = {key for key, value in content.items() if value is not None}
        given |= {"bf16"} if content.get("fp16") else set()
        left = {key: value for key, value in SFT_DEFAULTS.items() if key not in given}
        draft.set_defaults(left, TRAINER_ALL, "TRL's default")
    # Scripts of TRL train without `do_train`, and with `do_eval`, which `eval_strategy` sets.
    evaluates = "do_train" in content and is_off(content.get("eval_strategy"))
    why = "refused names a training on preferences or rewards, and recipes train on text"
    return {
        **purpose(content, "do_predict", "predict_with_generate", *["do_eval"] * evaluates),
        **{key: rule(f"{why} !! if it is one on text, import it under another {key}")
           for key in ("run_name", "output_dir")
           if OTHER_METHOD.search(Path(str(content.get(key, ""))).name.lower())},
        **trainer(draft, file),
    }  # fmt: skip


def trainer(draft: Draft, file: ConfigFile) -> dict[str, Any]:
    """Set the defaults of TrainingArguments, and return the rules of what they do not read."""
    draft.set_defaults(DEFAULTS, TRAINER_ALL, "transformers' default")
    draft.default("checkpoint.keep", None, "transformers keeps all")
    fsdp, block = file.content.get("fsdp"), file.content.get("fsdp_config")
    set_words(draft, fsdp)
    alone = unread(("fsdp_config", block and not fsdp, "fsdp is not set"))
    return {**alone, **deepspeed(draft, file)}


def deepspeed(draft: Draft, file: ConfigFile) -> dict[str, Any]:
    """Return the rule of the key `deepspeed` if it names a file, or note that it is a block."""
    value = file.content.get("deepspeed")
    if isinstance(value, str):
        return {"deepspeed": _named(draft, file)}
    draft.kinds |= {DEEPSPEED_KIND} if value else set()
    return {}


def _named(draft: Draft, file: ConfigFile, *none: Any) -> Rule:
    """Return the rule of a key that names another file, which has to be given too, or is `none`."""

    def named(value: Any) -> RuleResult:
        if value in none:
            return unset()
        if Path(str(value)).name in {each.path.name for each in draft.files}:
            return outcome("ignored is read as a separate file")
        hint = f"give it too: pipe import {file.path} {value}"
        return outcome(f"refused names another file !! {hint}")

    return named
