"""LLaMA-Factory's YAML recipes (`llamafactory-cli train`), as of version 0.9.5."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.importing import ConfigFile
from pipeline.utils import did_you_mean
from stages.importing import rules
from stages.importing.draft import Draft
from stages.importing.hugging_face import purpose, trainer, unread
from stages.importing.rules import Rule, RuleResult, Table, WrongValueError, outcome, why
from stages.importing.sources import HELD, RUNNING, TRAIN
from stages.importing.translator import RecipeTranslator

OWN = "LLaMA-Factory's default"
INFO_KIND = "data sets of LLaMA-Factory"
ADDRESSES = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}
"""Keys of which every entry has one."""
NAMES = {"dataset": TRAIN, "eval_dataset": HELD}
"""Keys with names of data sets -> beginning of their facts."""
PROBS = "interleave_probs"
Entries: TypeAlias = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Name of a data set -> file that has its entry, and the entry."""


def adapter_folder(value: Any) -> str:
    """Return the folder of an adapter."""
    if len(rules.names(value)) != 1:
        raise WrongValueError("refused merges several adapters !! merge them first")
    return rules.path(value)


TABLES = rules.load(
    "llama_factory", adapter_folder,
    all_or_names=lambda value: found if (found := rules.names(value)) != ["all"] else "all-linear",
)  # fmt: skip


class LlamaFactory(RecipeTranslator):
    """A recipe of LLaMA-Factory, with its dataset_info.json and the DeepSpeed JSON of its own."""

    name = "llama_factory"
    tool = "LLaMA-Factory"
    signs = "a recipe of LLaMA-Factory has `finetuning_type` or `cutoff_len`"

    def kind(self, content: Mapping[str, Any]) -> str | None:
        return INFO_KIND if _is_info(content) else super().kind(content)

    def read(self, draft: Draft, file: ConfigFile) -> None:
        content, running = {**file.content}, file.content.get("stage") == "pt"
        folder = content.get("dataset_dir", "data")
        files = [(each.path.name, each.content) for each in draft.files if _is_info(each.content)]
        inline = [(file.path.name, folder)] if isinstance(folder, Mapping) else []
        entries: Entries = {
            name: (info, entry)
            for info, content in (*inline, *files)
            for name, entry in content.items()
            if isinstance(entry, Mapping)
        }
        own = {
            **unread(("template", running and content.get("template"),
                      "stage: pt takes the text as it is")),
            **purpose(content, "do_predict", "predict_with_generate", "do_eval"),
            **trainer(draft, file),
        }  # fmt: skip
        named: dict[str, str] = {}
        for key, kind in NAMES.items():
            if content.get(key):
                own[key] = _naming(draft, file, entries, folder)
                with contextlib.suppress(WrongValueError):
                    each = enumerate(rules.names(content[key]))
                    named |= {f"{kind}{number}.": name for number, name in each}
        if weighed := str(content.get("mix_strategy")) == "interleave_over":
            own |= _weights(content)
        draft.read(file.path.name, content, {**self.table, **own})
        for one, name in named.items():
            if weighed and one.startswith(TRAIN):
                draft.default(f"{one}weight", 1.0, "interleave_over takes turns")
            if folder == "ONLINE":
                draft.default(f"{one}path", name, f"dataset in {file.path.name}")
            if folder == "ONLINE" or name in entries:
                where = folder if isinstance(folder, str) else "data"
                info, entry = ("", {}) if folder == "ONLINE" else entries[name]
                rows = _rows(draft, entry, one, where, running=running)
                draft.read(info, entry, rows, f"{name}.", one)
        for name, (info, entry) in entries.items():
            if name not in named.values():
                draft.enter(info, name, entry, outcome(why("other_sets")))
        _defaults(draft, content, running=running)


def _defaults(draft: Draft, content: Mapping[str, Any], *, running: bool) -> None:
    draft.set_defaults("llama_factory", TABLES["llama_factory"], OWN)
    rank = draft.value("adapter.rank")
    draft.default("adapter.alpha", float(2 * rank), "twice lora_rank, LLaMA-Factory's default")
    again = rules.is_off(content.get("disable_gradient_checkpointing"))
    draft.default("model.activation_checkpointing", {}, OWN, when=again)
    pure = draft.given("precision.master")
    draft.default("precision.compute", "bf16", "pure_bf16 in the recipe", when=pure)
    neat = draft.value("neat", False)
    packed = neat or draft.value("packing", False)
    length = draft.value("cutoff") - (1 if packed else 0)
    less = "LLaMA-Factory packs one token less than cutoff_len"
    draft.rename("cutoff", "data.sequence_length", content=length)
    draft.default("data.sequence_length", length, less if packed else OWN)
    if running:
        draft.default("data.prepend_bos", False, "LLaMA-Factory joins texts without a start token")
        draft.drop(why("joined_rows"), "packing", when=draft.given("packing") and not packed)
    elif neat:
        draft.rename("neat", "data.packing")
        draft.drop(why("idle"), "packing")
    elif packed:
        draft.drop(why("visible_rows"), "packing")


def _is_info(content: Mapping[str, Any]) -> bool:
    """Return whether it is the content of a dataset_info.json."""
    entries = content.values()
    return bool(entries) and all(
        isinstance(entry, Mapping) and ADDRESSES & entry.keys() for entry in entries
    )


def _naming(draft: Draft, file: ConfigFile, entries: Entries, folder: Any) -> Rule:
    """Return the rule of a key that names data sets."""

    def named(value: Any) -> RuleResult:
        missing = [name for name in rules.names(value) if name not in entries]
        if draft.request.data:
            return outcome(why("replaced", "--data"))
        if folder == "ONLINE" or not missing:
            return outcome(why("said_by_sets"))
        if entries:
            hint = did_you_mean(missing[0], [*entries])
            return outcome(why("unknown_set", missing[0], hint).rstrip())
        where = f"{folder if isinstance(folder, str) else 'data'}/dataset_info.json"
        return outcome(why("no_info", file.path, where))

    return Rule("@named", {"named": named})


def _weights(content: dict[str, Any]) -> Table:
    """Return the rules for the share of each data set, and add a key for each to the content."""
    value = content.get(PROBS)
    shares = value.split(",") if isinstance(value, str) else value
    if not isinstance(shares, list) or not shares:
        return {PROBS: Rule(why("no_shares", value))} if value else {}
    del content[PROBS]
    content |= {f"{PROBS}[{number}]": share for number, share in enumerate(shares)}
    return {f"{PROBS}[{number}]": Rule(f"{TRAIN}{number}.weight number")
            for number in range(len(shares))}  # fmt: skip


def _rows(draft: Draft, entry: Mapping[str, Any], one: str, folder: str, *, running: bool) -> Table:
    """Return the rules of an entry, and set its defaults. `running` text is trained on as it is."""
    if running:
        draft.default(f"{one}style", RUNNING, "stage: pt")
        draft.default(f"{one}text_key", "instruction", OWN)
    draft.default(f"{one}style", "alpaca", OWN)
    draft.default(f"{one}form", "sharegpt", OWN, when=not running)
    given = entry.get("tags")
    openai = isinstance(given, Mapping) and given.get("role_tag") == "role"
    parts = ["openai" if openai else "sharegpt", *["mirrored"] * ("hf_hub_url" in entry)]
    in_folder = {"in_folder": lambda name: str(Path(folder, name).absolute())}
    found = {**TABLES["entry"], "file_name": Rule(".path in_folder", in_folder)}
    for part in (*parts, *["running"] * running):
        for key, row in TABLES[part].items():
            found[key] = {**found.get(key, {}), **row} if isinstance(row, Mapping) else row
    return found
