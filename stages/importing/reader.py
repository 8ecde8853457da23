"""Files of accelerate, DeepSpeed and transformers, read into one report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.importing import ConfigFile
from stages.importing import rules
from stages.importing.engines import ACCELERATE, DEEPSPEED, set_words
from stages.importing.report import DIFFERENT, HARMLESS, Report
from stages.importing.rules import RuleResult, Table, ignored, refused
from stages.importing.tools import tool_of
from stages.importing.trainer import DEFAULTS, SFT_DEFAULTS, SFT_KEYS, TRAINER_ALL

NAMED_FILE = "deepspeed_config_file"
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
COMMON = frozenset({
    "bf16", "dtype", "fp16", "gradient_checkpointing", "learning_rate", "lora_alpha",
    "lora_dropout", "lora_r", "max_grad_norm", "max_length", "max_steps", "packing", "project",
    "run_name", "seed", "tf32", "trust_remote_code", "warmup_ratio", "warmup_steps",
    "weight_decay",
})  # fmt: skip
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
    others = sum(key.startswith((*HARMLESS, *DIFFERENT)) for key in content)
    return best if best and 2 * (len(known[best]) + others) >= len(content) else None


def _known(content: Mapping[str, Any], table: Table) -> list[str]:
    """Return the keys that the table could have: blocks where it has blocks, values elsewhere."""
    return [
        key
        for key, value in content.items()
        if key in table and (isinstance(value, Mapping) != callable(table[key]) or not value)
    ]


def read(report: Report, file: ConfigFile, kind: str) -> None:
    """Read a file of a known kind."""
    report.kinds.add(kind)
    reader = Reader(report, file)
    if kind == ACCELERATE_KIND:
        reader.accelerate()
    elif kind == TRAINER_KIND:
        reader.script()
    report.read(reader.name, reader.content, TABLES[kind])


class Reader:
    """Takes those keys out of a file that other keys decide, before its table is applied."""

    def __init__(self, report: Report, file: ConfigFile) -> None:
        self.report = report
        self.path = file.path
        self.name = file.path.name
        self.content = dict(file.content)

    def take(self, key: str, result: RuleResult) -> None:
        """Take out a key, with this outcome."""
        self.report.enter(self.name, key, self.content.pop(key), result)

    def skip(self, key: str, why: str) -> None:
        """Take out a key that its tool does not read either, because of `why`."""
        self.take(key, ignored(f"is not read: {why}"))

    def purpose(self, *others: str) -> None:
        """Refuse a file that asks for one of `others`, switches such as `do_predict`, and for no
        training."""
        asked = [key for key in others if not rules.is_off(self.content.get(key))]
        if asked and rules.is_off(self.content.get("do_train")):
            why = "is not training, the only thing a recipe does"
            hint = "set do_train: true, or evaluate with a slot evaluate: {use: evaluate.lm}"
            self.take(asked[0], refused(why, hint, blocks=True))

    def accelerate(self) -> None:
        """Take out what `accelerate launch` does not read, and the name of another file."""
        kind = str(self.content.get("distributed_type", "NO")).upper()
        for key, strategy in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
            if self.content.get(key) and kind != strategy:
                self.skip(key, f"distributed_type is {kind}")
        block = self.content.get("deepspeed_config")
        if isinstance(block, Mapping) and block.get(NAMED_FILE) not in (None, "", "none"):
            rest = dict(self.content.pop("deepspeed_config"))
            self._named(f"deepspeed_config.{NAMED_FILE}", str(rest.pop(NAMED_FILE)))
            self.content.update({"deepspeed_config": rest} if rest else {})

    def script(self) -> None:
        """Set the defaults of a script of transformers or TRL."""
        content = self.content
        if SFT_KEYS & content.keys():
            given = {key for key, value in content.items() if value is not None}
            given |= {"bf16"} if content.get("fp16") else set()
            left = {key: value for key, value in SFT_DEFAULTS.items() if key not in given}
            self.report.set_defaults(left, TRAINER_ALL, "TRL's default")
        # Scripts of TRL train without `do_train`, and with `do_eval`, which `eval_strategy` sets.
        evaluates = "do_train" in content and rules.is_off(content.get("eval_strategy"))
        self.purpose("do_predict", "predict_with_generate", *(["do_eval"] if evaluates else []))
        for key in ("run_name", "output_dir"):
            if OTHER_METHOD.search(Path(str(content.get(key, ""))).name.lower()):
                why = "names a training on preferences or rewards, and recipes train on text"
                hint = f"if it is one on text, import it under another {key}"
                self.take(key, refused(why, hint, blocks=True))
        self.trainer()

    def trainer(self) -> None:
        """Set the defaults of TrainingArguments, and take out what they do not read."""
        self.report.set_defaults(DEFAULTS, TRAINER_ALL, "transformers' default")
        self.report.default("checkpoint.keep", None, "transformers keeps all")
        if self.content.get("fsdp"):
            set_words(self.report, self.content["fsdp"])
        elif self.content.get("fsdp_config"):
            self.skip("fsdp_config", "fsdp is not set")
        self.deepspeed()

    def deepspeed(self) -> None:
        """Take out the key `deepspeed` if it names a file, or note that it is a block."""
        if isinstance(self.content.get("deepspeed"), str):
            self._named("deepspeed", self.content.pop("deepspeed"))
        elif self.content.get("deepspeed"):
            self.report.kinds.add(DEEPSPEED_KIND)

    def _named(self, key: str, name: str) -> None:
        """Enter a key that names another file, which has to be given too."""
        result = ignored("is read as a separate file")
        if Path(name).name not in self.report.files:
            hint = f"give it too: pipe import {self.path} {name}"
            result = refused("names another file", hint, blocks=True)
        self.report.enter(self.name, key, name, result)
