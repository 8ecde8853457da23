"""Files of accelerate, DeepSpeed and transformers, read into one report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.importing import ConfigFile, Translation
from stages.importing import rules
from stages.importing.engines import ACCELERATE, DEEPSPEED, set_words
from stages.importing.report import DIFFERENT, HARMLESS, Draft, Report
from stages.importing.rules import RuleResult, Table, refused
from stages.importing.tools import tool_of
from stages.importing.trainer import DEFAULTS, SFT_DEFAULTS, SFT_KEYS, TRAINER_ALL

NAMED_FILE = "deepspeed_config_file"
ACCELERATE_KIND = "accelerate config"
DEEPSPEED_KIND = "DeepSpeed configuration"
TRAINER_KIND = "transformers TrainingArguments"
TABLES: Mapping[str, Table] = {
    TRAINER_KIND: TRAINER_ALL,
    ACCELERATE_KIND: ACCELERATE,
    DEEPSPEED_KIND: DEEPSPEED,
}
"""Kinds of files, in the order in which they are read."""


OTHER_METHOD = re.compile(
    r"^(?!.*sft).*(^|[^a-z])(dpo|ipo|kto|orpo|cpo|simpo|apo|ppo|grpo|rloo|rlhf|reward)([^a-z]|$)"
)
"""Names of trainings that TRL's scripts share their keys with. A name with `sft` is of one on text:
`sft-for-grpo`."""
COMMON = frozenset(
    {
        "bf16", "dtype", "fp16", "gradient_checkpointing", "learning_rate", "lora_alpha",
        "lora_dropout", "lora_r", "max_grad_norm", "max_length", "max_steps", "packing", "project",
        "run_name", "seed", "tf32", "trust_remote_code", "warmup_ratio", "warmup_steps",
        "weight_decay",
    }
)  # fmt: skip
"""Keys that files of many tools have, which identify none."""


def kind_of(content: Mapping[str, Any]) -> str | None:
    """Return the kind that most keys belong to, of those that have a key to themselves; None for
    files of other tools."""
    if tool_of(content) is not None:
        return None
    known = {kind: _known(content, table) for kind, table in TABLES.items()}
    shared = Counter(key for keys in known.values() for key in keys)
    own = [
        kind
        for kind, keys in known.items()
        if any(shared[key] == 1 and not _common(key, content[key]) for key in keys)
    ]
    best = max(own, key=lambda kind: len(known[kind]), default=None)
    others = sum(key.startswith((*HARMLESS, *DIFFERENT)) for key in content)
    return best if best and 2 * (len(known[best]) + others) >= len(content) else None


def _common(key: str, value: Any) -> bool:
    return key in COMMON and not isinstance(value, Mapping)


def _known(content: Mapping[str, Any], table: Table) -> list[str]:
    """Return the keys that the table could have: blocks where it has blocks, values elsewhere."""
    return [
        key
        for key, value in content.items()
        if key in table and (isinstance(value, Mapping) != callable(table[key]) or not value)
    ]


class Reader:
    """Reads files into a report."""

    def __init__(self, files: Sequence[ConfigFile]) -> None:
        self.report = Report()
        self.kinds: set[str] = set()
        self._given = {file.path.name for file in files}

    def read(self, file: ConfigFile, kind: str) -> None:
        """Read one file of a known kind."""
        self.kinds.add(kind)
        content = dict(file.content)
        if kind == ACCELERATE_KIND:
            self._accelerate(file, content)
        elif kind == TRAINER_KIND:
            self._trainer(file, content)
        self.report.read(file.path.name, content, TABLES[kind])

    def translation(self, draft: Draft) -> Translation:
        """Return the drafted recipe with the outcomes, and no recipe if one of them blocks it."""
        outcomes = self.report.outcomes()
        blocked = any(outcome.blocks for outcome in outcomes)
        return Translation(
            recipe=None if blocked else {**draft.header, "stages": draft.slots},
            notes=draft.notes,
            missing={} if blocked else draft.missing,
            outcomes=outcomes,
        )

    def defaults(self, values: Mapping[str, Any], table: Table, why: str) -> None:
        """Set the values that hold where no key states others, by the rules of the table."""
        for key, value in values.items():
            rule = table[key]
            assert callable(rule)
            result = rule(value)
            self.report.default(result.fact, result.content, why)

    def skip(self, file: ConfigFile, content: dict[str, Any], key: str, why: str) -> None:
        """Take out a key that its tool does not read either, because of `why`."""
        result = RuleResult(outcome="default", why=f"is not read: {why}")
        self.report.enter(file.path.name, key, content.pop(key), result)

    def refuse(
        self, file: ConfigFile, content: dict[str, Any], key: str, result: RuleResult
    ) -> None:
        """Take out a key that is refused because of others."""
        self.report.enter(file.path.name, key, content.pop(key), result)

    def deepspeed(self, file: ConfigFile, content: dict[str, Any]) -> None:
        """Take out the key `deepspeed` if it names a file, or note that it is a block."""
        if isinstance(content.get("deepspeed"), str):
            self._named(file, "deepspeed", content.pop("deepspeed"))
        elif content.get("deepspeed"):
            self.kinds.add(DEEPSPEED_KIND)

    def purpose(self, file: ConfigFile, content: dict[str, Any], *others: str) -> None:
        """Refuse a file that asks for one of `others`, switches such as `do_predict`, and for no
        training."""
        asked = [key for key in others if not rules.is_off(content.get(key))]
        if asked and rules.is_off(content.get("do_train")):
            why = "is not training, the only thing a recipe does"
            hint = "set do_train: true, or evaluate with a slot evaluate: {use: evaluate.lm}"
            self.refuse(file, content, asked[0], refused(why, hint, blocks=True))

    def _accelerate(self, file: ConfigFile, content: dict[str, Any]) -> None:
        kind = str(content.get("distributed_type", "NO")).upper()
        for key, strategy in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
            if content.get(key) and kind != strategy:
                self.skip(file, content, key, f"distributed_type is {kind}")
        block = content.get("deepspeed_config")
        if isinstance(block, Mapping) and block.get(NAMED_FILE) not in (None, "", "none"):
            rest = dict(content.pop("deepspeed_config"))
            named = str(rest.pop(NAMED_FILE))
            self._named(file, f"deepspeed_config.{NAMED_FILE}", named)
            content.update({"deepspeed_config": rest} if rest else {})

    def _trainer(self, file: ConfigFile, content: dict[str, Any]) -> None:
        if SFT_KEYS & content.keys():
            given = {key for key, value in content.items() if value is not None}
            given |= {"bf16"} if content.get("fp16") else set()
            left = {key: value for key, value in SFT_DEFAULTS.items() if key not in given}
            self.defaults(left, TRAINER_ALL, "TRL's default")
        # Scripts of TRL train without `do_train`, and with `do_eval`, which `eval_strategy` sets.
        evaluates = "do_train" in content and rules.is_off(content.get("eval_strategy"))
        others = ("do_predict", "predict_with_generate", *(["do_eval"] if evaluates else []))
        self.purpose(file, content, *others)
        for key in ("run_name", "output_dir"):
            if OTHER_METHOD.search(Path(str(content.get(key, ""))).name.lower()):
                why = "names a training on preferences or rewards, and recipes train on text"
                hint = f"if it is one on text, import it under another {key}"
                self.refuse(file, content, key, refused(why, hint, blocks=True))
        self.trainer(file, content)

    def trainer(self, file: ConfigFile, content: dict[str, Any]) -> None:
        """Set the defaults of TrainingArguments, and take out what they do not read."""
        self.defaults(DEFAULTS, TRAINER_ALL, "transformers' default")
        self.report.default("checkpoint.keep", None, "transformers keeps all")
        if content.get("fsdp"):
            set_words(self.report, content["fsdp"])
        if content.get("fsdp_config") and not content.get("fsdp"):
            self.skip(file, content, "fsdp_config", "fsdp is not set")
        self.deepspeed(file, content)

    def _named(self, file: ConfigFile, key: str, name: str) -> None:
        """Enter a key that names another file, which has to be given too."""
        result = RuleResult(outcome="default", why="is read as a separate file")
        if Path(name).name not in self._given:
            hint = f"give it too: pipe import {file.path} {name}"
            result = refused("names another file", hint, blocks=True)
        self.report.enter(file.path.name, key, name, result)
