"""accelerate's, DeepSpeed's and transformers' files, which together describe one training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.importing import ConfigFile, Request, Translation, Translator
from stages.importing.engines import ACCELERATE, DEEPSPEED, set_defaults
from stages.importing.recipe import compose
from stages.importing.report import DIFFERENT, HARMLESS, Report
from stages.importing.rules import RuleResult, Table, refused
from stages.importing.trainer import DEFAULTS, SFT_DEFAULTS, SFT_KEYS, TRAINER, TRAINER_ALL

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

OTHER_TOOLS: Mapping[str, frozenset[str]] = {
    tool: frozenset(keys.split())
    for tool, keys in {
        "axolotl": "base_model num_epochs rl sample_packing sequence_len",
        "LLaMA-Factory": "cutoff_len finetuning_type lora_rank lora_target pref_beta template",
        "ms-swift": "rlhf_type sft_type train_type tuner_backend tuner_type",
        "TRL for preference or reinforcement learning": "beta center_rewards_coefficient cpo_alpha "
        "desirable_weight kl_coef label_smoothing lmbda max_completion_length max_prompt_length "
        "num_generations num_ppo_epochs simpo_gamma use_vllm",
        "Megatron": "pipeline_model_parallel_size tensor_model_parallel_size",
        "Lightning": "exp_manager seed_everything trainer",
        "peft (adapter_config.json)": "base_model_name_or_path peft_type",
        "a model (config.json)": "architectures vocab_size",
    }.items()
}
"""Tool -> keys that none of the files translated here has. One such key identifies the tool."""


class HuggingFace(Translator):
    """`accelerate config` files, DeepSpeed JSON and TrainingArguments, alone or together."""

    name = "hugging_face"

    def kind(self, content: Mapping[str, Any]) -> str | None:
        """Return the kind that most keys belong to, of those that have a key to themselves."""
        if self.other_tool(content) is not None:
            return None
        known = {kind: _known(content, table) for kind, table in TABLES.items()}
        shared = Counter(key for keys in known.values() for key in keys)
        own = [kind for kind, keys in known.items() if any(shared[key] == 1 for key in keys)]
        best = max(own, key=lambda kind: len(known[kind]), default=None)
        others = sum(key.startswith((*HARMLESS, *DIFFERENT)) for key in content)
        return best if best and 2 * (len(known[best]) + others) >= len(content) else None

    def other_tool(self, content: Mapping[str, Any]) -> str | None:
        return next((tool for tool, keys in OTHER_TOOLS.items() if content.keys() & keys), None)

    def translate(self, files: Sequence[ConfigFile], request: Request) -> Translation:
        reader = _Reader(files)
        for kind in TABLES:
            for file in files:
                if self.kind(file.content) == kind:
                    reader.read(file, kind)
        if DEEPSPEED_KIND in reader.kinds:
            set_defaults(reader.report, alone=TRAINER_KIND not in reader.kinds)
        draft = compose(reader.report, request, files[0].path.stem)
        outcomes = reader.report.outcomes()
        blocked = any(outcome.blocks for outcome in outcomes)
        return Translation(
            recipe=None if blocked else {**draft.header, "stages": draft.slots},
            notes=draft.notes,
            missing={} if blocked else draft.missing,
            outcomes=outcomes,
        )


class _Reader:
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

    def _accelerate(self, file: ConfigFile, content: dict[str, Any]) -> None:
        kind = str(content.get("distributed_type", "NO")).upper()
        for key, strategy in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
            if content.get(key) and kind != strategy:
                self._skip(file, key, content.pop(key), f"distributed_type is {kind}")
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
            self._defaults(left, "TRL's default")
        self._defaults(DEFAULTS, "transformers' default")
        self.report.default("checkpoint.keep", None, "transformers keeps all")
        if content.get("fsdp_config") and not content.get("fsdp"):
            self._skip(file, "fsdp_config", content.pop("fsdp_config"), "fsdp is not set")
        if isinstance(content.get("deepspeed"), str):
            self._named(file, "deepspeed", content.pop("deepspeed"))
        elif content.get("deepspeed"):
            self.kinds.add(DEEPSPEED_KIND)

    def _defaults(self, values: Mapping[str, Any], why: str) -> None:
        for key, value in values.items():
            rule = TRAINER[key]
            assert callable(rule)
            result = rule(value)
            self.report.default(result.fact, result.content, why)

    def _skip(self, file: ConfigFile, key: str, value: Any, why: str) -> None:
        result = RuleResult(outcome="default", why=f"is not read: {why}")
        self.report.enter(file.path.name, key, value, result)

    def _named(self, file: ConfigFile, key: str, name: str) -> None:
        """Enter a key that names another file, which has to be given too."""
        result = RuleResult(outcome="default", why="is read as a file of its own")
        if Path(name).name not in self._given:
            hint = f"give it too: pipe import {file.path} {name}"
            result = refused("names another file", hint, blocks=True)
        self.report.enter(file.path.name, key, name, result)


def _known(content: Mapping[str, Any], table: Table) -> list[str]:
    """Return the keys that the table could have: blocks where it has blocks, values elsewhere."""
    return [
        key
        for key, value in content.items()
        if key in table and (isinstance(value, Mapping) != callable(table[key]) or not value)
    ]
