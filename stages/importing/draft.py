"""The facts that the files give, the outcome of each key, and the recipe that is made of them."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.importing import ConfigFile, KeyOutcome, KeyPath, Request, Translation
from stages.importing.rules import Block, RuleResult, Table, applied, is_off, outcome, table, unset

METHOD = re.compile(
    r"lora|adapter|peft|tuner|finetun|freeze|quanti|dpo|rlhf|reward|prefer|ref_model|teacher"
    r"|distill|parallel|megatron|(^|_)(tp|pp|cp|sp|ep)_size"
)
"""Names of keys that change the training method. A key of such a name without a rule blocks the
recipe, since another training would start without it."""
BEGINNINGS = table("""
    amp amsgrad bf16_optimizer_states chat_template compression_training config_name
    config_overrides curriculum_learning data_efficiency dataset_kwargs eigenvalue elasticity
    eos_token fp16_master_weights fp16_optimizer_states max_train_samples mixed_precision_policy
    model_init_kwargs model_type neftune_noise_alpha num_stable_steps optim_args
    optim_target_modules param_dtype progressive_layer_drop router_aux_loss_coef sparse_attention
    torch_autocast use_bnb_nested_quant zenflow: refused changes the training, and no recipe \
        expresses it
    activation_checkpointing allgather_partitions backward_prefetch bf16_ bnb_4bit_ cache_dir
    command_file comms_logger cpu_ram_efficient_loading dataloader_ dataset_num_proc ddp_ deepspeed_
    disable_tqdm dispatch_batches do_eval do_train downcast_bf16 elastic_checkpoint eval_
    even_batches flops_profiler fp16_ fused gather_ gpu_ids gradient_checkpointing_kwargs hub_
    hysteresis include_ keep_module_on_host label_names length_column_name liger_kernel_config
    limit_all_gathers load_from_fp32_ local_rank log_ logging_ low_cpu_mem_usage machine_rank main_
    min_loss_scale num_machines optim_state_dict overwrite_ pad_ padding_ parallelism_config_cp_
    parallelism_config_sp_ per_device_eval_ preprocessing_ project rdzv_backend reduce_scatter
    remove_unused_columns same_network save_on_ save_safetensors shuffle_dataset skip_memory_metrics
    stage3_gather_ state_dict steps_per_print sync_ tp_grain_size tp_overlap_comm tpu_ use_cache
    use_fast_tokenizer use_orig_params use_seedable_sampler vocab_parallel_ wall_clock_breakdown
    zero3_ zero_allow_ zero_force_: ignored changes nothing that is trained
""")
"""Beginnings of keys that no table has a rule for."""

SECRET = re.compile(r"(hub|auth|access|api)_(token|key)$|password|secret")
"""Names of keys whose values are shown nowhere."""
NO_BLOCK = "refused must be a block of keys"
SAID = ("outcome", "why", "hint", "blocks")
NO_EFFECT = "ignored has no effect with the other settings"


class Rows(NamedTuple):
    """The rule of a key with a data set, or a list of them, each of which is a block."""

    kind: str
    """Beginning of their facts."""
    table: Callable[[Block, str, str], Table]
    """Returns the rules of a block with its facts' beginning and its name."""
    wrong: str = NO_BLOCK
    """Outcome of what is no block."""


class Draft:
    """Every key of every file, the facts that they give, and the recipe in the making. Its keys are
    dotted; slots stand at the top, as in overrides."""

    def __init__(self, files: Sequence[ConfigFile] = (), request: Request | None = None) -> None:
        self.files, self.request = files, request or Request()
        self.kinds: set[str] = set()
        """Kinds of files of accelerate, DeepSpeed and transformers that were read."""
        self.entries: list[RuleResult] = []
        self.defaults: dict[str, tuple[Any, str]] = {}
        """Fact -> value and reason, for facts that no key has to give."""
        self._facts: dict[str, list[RuleResult]] = {}
        self._sets = 0
        self.header: dict[str, Any] = {}
        self.slots: dict[str, dict[str, Any]] = {}
        self.notes: dict[KeyPath, str] = {}
        self.missing: dict[str, str] = {}

    def read(
        self, file: str, content: Block, table: Block, prefix: str = "", one: str = ""
    ) -> None:
        """Apply the table's rules to every key of a file or block; `*` has the rule of those that
        it does not name. `one` stands before the facts whose names begin with a dot."""
        for key, value in content.items():
            name, rule = f"{prefix}{key}", table.get(key, table.get("*"))
            if isinstance(rule, Rows) and value:
                self._read_rows(file, name, value, rule)
                continue
            if isinstance(rule, Mapping) and isinstance(value, Mapping) and value:
                self.read(file, value, rule, f"{name}.", one)
                continue
            if rule is None:
                result = _without_rule(key, value, table)
            elif callable(rule):
                result = applied(rule, value)
            else:
                result = unset() if is_off(value) or value == "auto" else outcome(NO_BLOCK)
            result.fact = re.sub(r"^\.", one, result.fact)
            self.enter(file, name, value, result)

    def _read_rows(self, file: str, key: str, value: Any, rows: Rows) -> None:
        for index, block in enumerate(value if isinstance(value, list) else [value]):
            name = f"{key}[{index}]" if isinstance(value, list) else key
            self._sets += 1
            one = f"{rows.kind}{self._sets}."
            if isinstance(block, Mapping) and block:
                self.read(file, block, rows.table(block, one, name), f"{name}.", one)
            else:
                self.enter(file, name, block, unset() if is_off(block) else outcome(rows.wrong))

    def enter(self, file: str, key: str, value: Any, entry: RuleResult) -> None:
        """Add a key. A fact that another key gives with another value is a contradiction."""
        for other in self.of(entry.fact):
            if not (other.auto or entry.auto) and other.content != entry.content:
                why = f"refused contradicts {other.key}: {other.value!r} in {other.file}"
                entry = outcome(f"{why} !! use the same value in both")
        entry.file, entry.key = file, key
        entry.value = "(hidden)" if SECRET.search(key) and value else value
        self.entries.append(entry)
        if entry.fact:
            self._facts.setdefault(entry.fact, []).append(entry)

    def default(self, fact: str, value: Any, why: str, *, when: Any = True) -> None:
        """Set the value that holds where no key states one. The first default wins."""
        if when:
            self.defaults.setdefault(fact, (value, why))

    def set_defaults(self, values: Block, table: Block, why: str) -> None:
        """Set the values that hold where no key states others, by the rules of the table."""
        for result in (table[key](value) for key, value in values.items()):
            self.default(result.fact, result.content, why)

    def given(self, fact: str) -> bool:
        """Return whether a key gives the fact a value, also through `auto`."""
        return any(not entry.auto or entry.content is not None for entry in self.of(fact))

    def known(self, fact: str) -> bool:
        """Return whether the fact is given or has a default."""
        return fact in self.defaults or self.given(fact)

    def facts(self, prefix: str = "") -> list[str]:
        """Return the facts whose names begin with `prefix`, sorted."""
        return sorted(f for f in {*self._facts, *self.defaults} if f.startswith(prefix))

    def of(self, fact: str) -> list[RuleResult]:
        """Return the keys that give the fact."""
        return self._facts.get(fact, [])

    def value(self, fact: str, otherwise: Any = None) -> Any:
        """Return the stated value, else the default, else the meaning of `auto`."""
        entries = sorted(self.of(fact), key=lambda entry: entry.auto)
        if fact in self.defaults and (not entries or entries[0].auto):
            return self.defaults[fact][0]
        content = entries[0].content if entries else None
        return otherwise if content is None else content

    def rename(self, fact: str, name: str, **changes: Any) -> None:
        """Give a fact the name, and with `content=` the value, that it has in company of others."""
        for entry in self._facts.pop(fact, []):
            vars(entry).update(changes, fact=name)
            self._facts.setdefault(name, []).append(entry)

    def drop(self, text: str, *facts: str, when: bool = True) -> None:
        """Forget facts that have no place in the recipe, with the outcome that the text says."""
        for fact in facts if when else ():
            self.defaults.pop(fact, None)
            for entry in self._facts.pop(fact, ()):
                said = vars(outcome(text))
                vars(entry).update({name: said[name] for name in SAID}, to={})

    def outcomes(self) -> list[KeyOutcome]:
        """Return the final outcome of every key, in the order in which they were read."""
        for entry in self.entries:
            if entry.outcome == "translated" and not entry.to:
                none = "ignored auto, and no file has the value"
                said = outcome(none if entry.auto else NO_EFFECT)
                entry.why, entry.outcome = said.why, said.outcome
            elif entry.auto and entry.to:
                stated = [other for other in self.of(entry.fact) if not other.auto]
                source = [f"{other.key} in {other.file}" for other in stated]
                entry.why = f"auto: as {source[0] if source else 'transformers fills it in'}"
        return [*self.entries]

    def slot(self, name: str, use: str, *facts: str) -> None:
        """Add a slot, which follows from `facts`."""
        self.slots[name] = {}
        self.put(f"{name}.use", use, *facts)

    def put(self, key: str, value: Any, *facts: str, note: str = "") -> None:
        """Set a value, which follows from `facts`, with a comment about its source."""
        first, *inner = key.split(".")
        in_slot = first in self.slots
        block = self.slots if in_slot else self.header
        for part in (first, *inner)[:-1]:
            block = block.setdefault(part, {})
        block[key.rpartition(".")[2]] = copy.deepcopy(value)
        entries = [entry for fact in facts for entry in self.of(fact)]
        for entry in entries:
            entry.to[key] = value
        keys = dict.fromkeys(f"{entry.key} in {entry.file}" for entry in entries)
        reasons = (self.defaults[fact][1] for fact in facts if fact in self.defaults)
        comment = note or ", ".join(keys) or next(reasons, "")
        if comment:
            self.notes[("stages", first, *inner) if in_slot else (first, *inner)] = comment

    def copy(self, fact: str, key: str = "") -> None:
        """Set a fact's value at `key`, which is by default named like the fact, if it is known."""
        if self.known(fact):
            self.put(key or fact, self.value(fact), fact)

    def copy_all(self) -> None:
        """Copy the facts that are named like recipe keys, or like fields of the wrap stage."""
        strategy = self.slots["wrap"]["use"].removeprefix("wrap.")
        for fact in self.facts():
            slot, dot, name = fact.partition(".")
            if slot == strategy:
                self.copy(fact, f"wrap.{name}")
            elif (dot and slot in self.slots) or slot in ("launch", "seed"):
                self.copy(fact)

    def lacks(self, key: str, what: str) -> None:
        """Mark a field that the user has to fill in with `what`, if no fact gives it."""
        if self.known(key):
            return
        slot, _, name = key.partition(".")
        self.missing[key] = what
        path: KeyPath = ("stages", slot, "use")
        before = f"{self.notes[path]}; " if path in self.notes else ""
        self.notes[path] = f"{before}fill in `{name}`: {what}"

    def translation(self) -> Translation:
        """Return the recipe with the outcomes, and no recipe if one of them blocks it."""
        outcomes = self.outcomes()
        blocked = any(outcome.blocks for outcome in outcomes)
        return Translation(
            recipe=None if blocked else {**self.header, "stages": self.slots},
            notes=self.notes,
            missing={} if blocked else self.missing,
            outcomes=outcomes,
        )


def _without_rule(key: str, value: Any, known: Table) -> RuleResult:
    """Return the outcome of a key that the table does not have."""
    name = key.removeprefix("fsdp_")
    if is_off(value) or value == f"<{key.upper()}>":  # transformers writes this for a secret
        return unset()
    if SECRET.search(key):
        variable = key.upper() if key.endswith("api_key") else "HF_TOKEN"
        why = "refused secrets do not belong in a recipe"
        return outcome(f"{why} -- set {variable} in the environment")
    for beginning, rule in BEGINNINGS.items():
        if name.startswith(beginning):
            return applied(rule, value)
    similar = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    hint = f"did you mean `{similar[0]}`?" if similar else ""
    if METHOD.search(key):
        return outcome(f"refused may change the training method !! {hint}".rstrip())
    return RuleResult(outcome="not translated", hint=hint)
