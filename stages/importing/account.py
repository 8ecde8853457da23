"""What the files say, and what has become of each of their keys so far."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.importing.translator import KeyOutcome
from pipeline.recipe.nodes import KeyPath
from pipeline.utils.text import did_you_mean
from stages.importing.rules import UNSET, Auto, Table, Verdict, judge

LEFT_OVER = "has no place in this recipe"


@dataclass(kw_only=True)
class Entry:
    """A key of a file, the verdict on it, and where the recipe says it."""

    file: str
    key: str
    value: Any
    verdict: Verdict
    to: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    """More than the verdict says."""

    def fate(self) -> KeyOutcome:
        """How it ended."""
        verdict = self.verdict
        if verdict.outcome == "translated" and not self.to:
            verdict = Verdict(outcome="refused", why=LEFT_OVER)
        return KeyOutcome(
            file=self.file,
            key=self.key,
            value=self.value,
            outcome=verdict.outcome,
            to=self.to if verdict.outcome == "translated" else {},
            why="; ".join(part for part in (verdict.why, self.why) if part),
            hint=verdict.hint,
            blocks=verdict.blocks,
        )


class Account:
    """Every key of every file, and the facts that they give."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.assumed: dict[str, tuple[Any, str]] = {}
        self._facts: dict[str, list[Entry]] = {}

    def read(self, file: str, content: Mapping[str, Any], table: Table, prefix: str = "") -> None:
        """Judge every key of a file or block. Unknown keys are refused."""
        for key, value in content.items():
            rule = table.get(key)
            where = f"{prefix}{key}"
            if rule is None:
                hint = did_you_mean(key, table) if len(table) < 12 else _near(key, table)
                unknown = Verdict(
                    outcome="refused",
                    why="is no key that is known here",
                    hint=hint,
                    blocks=bool(value and METHOD.search(key)),
                )
                self.enter(file, where, value, unknown)
            elif callable(rule):
                self.enter(file, where, value, judge(rule, value))
            elif isinstance(value, Mapping) and value:
                self.read(file, value, rule, f"{where}.")
            else:
                self.enter(file, where, value, _no_block(value))

    def dismiss_all(self, file: str, content: Mapping[str, Any], prefix: str, why: str) -> None:
        """Every key of a block that does not count."""
        for key, value in content.items():
            self.enter(file, f"{prefix}{key}", value, Verdict(outcome="default", why=why))

    def enter(self, file: str, key: str, value: Any, verdict: Verdict) -> None:
        """Take down a verdict. A fact that another key has given otherwise is a contradiction."""
        entry = Entry(file=file, key=key, value=value, verdict=verdict)
        self.entries.append(entry)
        if verdict.outcome != "translated":
            return
        for other in self._facts.get(verdict.fact, ()):
            known = other.verdict.value
            if Auto not in (type(known), type(verdict.value)) and known != verdict.value:
                entry.verdict = Verdict(
                    outcome="refused",
                    why=f"contradicts {other.key}: {other.value!r} in {other.file}",
                    hint="say the same in both",
                    blocks=True,
                )
                return
        self._facts.setdefault(verdict.fact, []).append(entry)

    def reconsider(self, file: str, key: str, verdict: Verdict) -> None:
        """Think better of a key that gives no fact."""
        for entry in self.entries:
            if (entry.file, entry.key) == (file, key):
                entry.verdict = verdict

    def assume(self, fact: str, value: Any, why: str) -> None:
        """What holds for a fact that no key gives."""
        self.assumed.setdefault(fact, (value, why))

    def says(self, fact: str) -> bool:
        """Whether some key gives the fact, or one is assumed."""
        return fact in self._facts or fact in self.assumed

    def given(self, fact: str) -> bool:
        """Whether some key gives the fact."""
        return fact in self._facts

    def value(self, fact: str, default: Any = None) -> Any:
        """The fact: as a key gives it, as assumed, or what `auto` falls back to."""
        entries = self._facts.get(fact, [])
        if any(not isinstance(entry.verdict.value, Auto) for entry in entries):
            return self.stated(fact)
        if fact in self.assumed:
            return self.assumed[fact][0]
        return entries[0].verdict.value.default if entries else default

    def stated(self, fact: str) -> Any:
        """The fact as a key gives it in so many words; None if none does."""
        values = [entry.verdict.value for entry in self.of(fact)]
        return next((value for value in values if not isinstance(value, Auto)), None)

    def fates(self) -> list[KeyOutcome]:
        """How every key ended, in the order in which they were read."""
        for entry in self.entries:
            if isinstance(entry.verdict.value, Auto) and entry.to:
                entry.why = self._automatic(entry.verdict.fact)
        return [entry.fate() for entry in self.entries]

    def _automatic(self, fact: str) -> str:
        for entry in self.of(fact):
            if not isinstance(entry.verdict.value, Auto):
                return f"auto: as {entry.key} in {entry.file}"
        return "auto: as transformers fills it in"

    def facts(self, prefix: str) -> dict[str, Any]:
        """Given facts whose names begin with `prefix`, without it."""
        return {
            fact.removeprefix(prefix): self.value(fact)
            for fact in self._facts
            if fact.startswith(prefix)
        }

    def of(self, fact: str) -> list[Entry]:
        """The keys that give the fact."""
        return self._facts.get(fact, [])

    def dismiss(self, fact: str, why: str) -> None:
        """Where the recipe has not said the fact, and not refused it, it need not be said."""
        for entry in self.of(fact):
            if not entry.to and entry.verdict.outcome == "translated":
                entry.verdict = replace(entry.verdict, outcome="default", why=why)

    def refuse(self, fact: str, why: str, hint: str = "", *, blocks: bool = False) -> None:
        """The recipe does not do it."""
        for entry in self.of(fact):
            entry.to.clear()
            entry.verdict = replace(
                entry.verdict, outcome="refused", why=why, hint=hint, blocks=blocks
            )


def _near(key: str, table: Table) -> str:
    hint = did_you_mean(key, table)
    return "" if hint.startswith("known here") else hint


def _no_block(value: Any) -> Verdict:
    if not value or value in ("no", "none", "auto"):
        return Verdict(outcome="default", why=UNSET)
    return Verdict(outcome="refused", why="must be a block of keys")


class Draft:
    """Recipe values by dotted key (`train.steps`; slots stand at the top, as in overrides)."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.header: dict[str, Any] = {}
        self.slots: dict[str, dict[str, Any]] = {}
        self.notes: dict[KeyPath, str] = {}
        self.missing: dict[str, str] = {}

    def slot(self, name: str, use: str) -> None:
        """A slot, behind those that are there."""
        self.slots[name] = {"use": use}

    def put(self, key: str, value: Any, *facts: str, note: str = "") -> None:
        """Say `value` at `key`, which follows from `facts`."""
        slot, *inner = key.split(".")
        path = ("stages", slot, *inner) if slot in self.slots else (slot, *inner)
        block = self.slots if slot in self.slots else self.header
        for part in (slot, *inner)[:-1]:
            block = block.setdefault(part, {})
        block[(slot, *inner)[-1]] = value
        for fact in facts:
            for entry in self.account.of(fact):
                entry.to[key] = value
        text = note or self._origin(facts)
        if text:
            self.notes[path] = text

    def copy(self, fact: str, key: str, read: Callable[[Any], Any] = lambda value: value) -> None:
        """Say a fact at `key`, if there is one."""
        if self.account.says(fact):
            self.put(key, read(self.account.value(fact)), fact)

    def lacks(self, key: str, what: str) -> None:
        """A field that the person has to fill in."""
        slot, _, field = key.partition(".")
        self.missing[key] = what
        path: KeyPath = ("stages", slot, "use")
        before = f"{self.notes[path]}; " if path in self.notes else ""
        self.notes[path] = f"{before}fill in `{field}`: {what}"

    def _origin(self, facts: tuple[str, ...]) -> str:
        entries = [entry for fact in facts for entry in self.account.of(fact)]
        plain = [f"{entry.key} in {entry.file}" for entry in entries]
        if plain:
            return ", ".join(dict.fromkeys(plain))
        return next((self.account.assumed[f][1] for f in facts if f in self.account.assumed), "")


FOREIGN: Mapping[str, frozenset[str]] = {
    "axolotl": frozenset(
        {"base_model", "sequence_len", "sample_packing", "lora_target_linear", "rl", "num_epochs"}
    ),
    "LLaMA-Factory": frozenset(
        {
            *("finetuning_type", "stage", "template", "cutoff_len", "dataset_dir", "lora_rank"),
            *("lora_target", "pref_beta", "pref_loss", "quantization_bit"),
        }
    ),
    "ms-swift": frozenset({"tuner_type", "train_type", "sft_type", "rlhf_type", "tuner_backend"}),
    "TRL for preference or reinforcement learning": frozenset(
        {
            *("beta", "reference_free", "precompute_ref_log_probs", "precompute_ref_batch_size"),
            *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "ld_alpha"),
            *("f_divergence_type", "discopop_tau", "loss_weights", "use_weighting", "rpo_alpha"),
            *("label_smoothing", "max_prompt_length", "max_completion_length", "num_generations"),
            *("reward_funcs", "reward_weights", "reward_model_path", "center_rewards_coefficient"),
            *("scale_rewards", "desirable_weight", "undesirable_weight", "cpo_alpha", "tpo_alpha"),
            *("simpo_gamma", "kl_coef", "cliprange", "num_ppo_epochs", "whiten_rewards", "lmbda"),
            *("use_vllm", "disable_dropout", "teacher_model_name_or_path", "num_value_samples"),
            *("teacher_model_kind", "teacher_server_urls", "teacher_model_server_url"),
        }
    ),
    "Megatron": frozenset({"tensor_model_parallel_size", "pipeline_model_parallel_size"}),
    "Lightning": frozenset({"trainer", "seed_everything", "exp_manager"}),
    "peft (adapter_config.json)": frozenset({"peft_type", "base_model_name_or_path"}),
    "a model (config.json)": frozenset({"architectures", "vocab_size"}),
}
"""Tool -> keys that none of the files read here has; one of them tells."""

METHOD = re.compile(
    r"lora|adapter|peft|tuner|finetun|freeze|quanti|dpo|rlhf|reward|prefer|ref_model|teacher"
    r"|distill|parallel|(^|_)(tp|pp|cp|sp|ep)_size"
)
"""Names of keys that change what is trained, or how, rather than tune it."""


def tool(content: Mapping[str, Any]) -> str | None:
    """Whose configuration it is, if its keys tell that it is none of those read here."""
    if any(isinstance(value, Mapping) and "_component_" in value for value in content.values()):
        return "torchtune"
    return next((name for name, keys in FOREIGN.items() if keys & content.keys()), None)
