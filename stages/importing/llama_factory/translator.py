"""LLaMA-Factory's recipes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.importing import ConfigFile
from pipeline.utils import did_you_mean
from stages.importing import rules
from stages.importing.llama_factory.keys import TABLE
from stages.importing.reader import purpose, trainer, unread
from stages.importing.report import Report
from stages.importing.rules import RuleResult, Table, outcome, rule, sets, table
from stages.importing.sources import HELD, TRAIN, Style
from stages.importing.tools import LLAMA_FACTORY
from stages.importing.translator import RecipeTranslator

DEFAULTS: Mapping[str, Any] = {
    "finetuning_type": "lora", "lora_rank": 8, "lora_dropout": 0.0, "lora_target": "all",
    "cutoff_len": 2048,
}  # fmt: skip
"""Defaults of LLaMA-Factory that differ from the recipe's."""
INFO_KIND = "data sets of LLaMA-Factory"


class LlamaFactory(RecipeTranslator):
    """A recipe of LLaMA-Factory, with its dataset_info.json and the DeepSpeed JSON of its own."""

    name = "llama_factory"
    tool = LLAMA_FACTORY
    signs = "a recipe of LLaMA-Factory has `finetuning_type` or `cutoff_len`"
    table = TABLE
    companies = ({}, {"eval_strategy": "steps"})

    def kind(self, content: Mapping[str, Any]) -> str | None:
        return INFO_KIND if _is_info(content) else super().kind(content)

    def read(self, report: Report, file: ConfigFile) -> None:
        content, running = {**file.content}, file.content.get("stage") == "pt"
        folder = content.get("dataset_dir", "data")
        files = [(each.path.name, each.content) for each in report.files if _is_info(each.content)]
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
            **trainer(report, file),
        }  # fmt: skip
        named: dict[str, str] = {}
        for key, kind in NAMES.items():
            if content.get(key):
                own[key] = _naming(report, file, entries, folder)
                with contextlib.suppress(rules.WrongValueError):
                    each = enumerate(rules.names(content[key]))
                    named |= {f"{kind}{number}.": name for number, name in each}
        if weighed := str(content.get("mix_strategy")) == "interleave_over":
            own |= _weights(content)
        report.read(file.path.name, content, {**TABLE, **own})
        for one, name in named.items():
            if weighed and one.startswith(TRAIN):
                report.default(f"{one}weight", 1.0, "interleave_over takes turns")
            if folder == "ONLINE":
                report.default(f"{one}path", name, f"dataset in {file.path.name}")
            if folder == "ONLINE" or name in entries:
                where = folder if isinstance(folder, str) else "data"
                info, entry = ("", {}) if folder == "ONLINE" else entries[name]
                rows = _rows(report, entry, one, where, running=running)
                report.read(info, entry, rows, f"{name}.", one)
        for name, (info, entry) in entries.items():
            if name not in named.values():
                other = outcome("ignored the recipe names other data sets")
                report.enter(info, name, entry, other)
        report.set_defaults(DEFAULTS, TABLE, OWN)
        rank = report.value("adapter.rank")
        report.default("adapter.alpha", float(2 * rank), "twice lora_rank, LLaMA-Factory's default")
        report.default("data.loss", "assistant", "LLaMA-Factory trains on what the assistant says")
        if rules.is_off(content.get("disable_gradient_checkpointing")):
            report.default("model.activation_checkpointing", {}, OWN)
        if report.given("precision.master"):
            report.default("precision.compute", "bf16", "pure_bf16 in the recipe")
        _lengths(report, running=running)


def _lengths(report: Report, *, running: bool) -> None:
    """Decide what is packed, and how long a sample is."""
    neat = report.value("neat", False)
    packed = neat or report.value("packing", False)
    length = report.value("cutoff") - (1 if packed else 0)
    why = "LLaMA-Factory packs one token less than cutoff_len" if packed else OWN
    report.rename("cutoff", "data.sequence_length", content=length)
    report.default("data.sequence_length", length, why)
    if running:
        report.default("data.prepend_bos", False, "LLaMA-Factory joins texts without a start token")
        report.drop("refused data.text joins the rows of a text -- leave packing out", "packing",
                    when=report.given("packing") and not packed)  # fmt: skip
    elif neat:
        report.rename("neat", "data.packing")
        report.drop("ignored follows neat_packing", "packing")
    elif packed:
        why = "refused rows of one sample never see each other -- set neat_packing: true"
        report.drop(why, "packing")


INFO = "dataset_info.json"
ADDRESSES = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}
"""Keys of which every entry has one."""
NAMES = {"dataset": TRAIN, "eval_dataset": HELD}
"""Keys with names of data sets -> beginning of their facts."""
PROBS = "interleave_probs"
STYLES = {"alpaca": Style(form="alpaca"), "sharegpt": Style(), "openai": Style()}
TAGS = {
    "messages": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                 "assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool"},
    "sharegpt": {"role_tag": "from", "content_tag": "value", "user_tag": "human",
                 "assistant_tag": "gpt", "observation_tag": "observation",
                 "function_tag": "function_call", "system_tag": "system"},
}  # fmt: skip
"""Names of roles and contents, as OpenAI and as ShareGPT write them."""
OWN = "LLaMA-Factory's default"
Entries: TypeAlias = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Name of a data set -> file that has its entry, and the entry."""


def _is_info(content: Mapping[str, Any]) -> bool:
    """Return whether it is the content of a dataset_info.json."""
    entries = content.values()
    return bool(entries) and all(
        isinstance(entry, Mapping) and ADDRESSES & entry.keys() for entry in entries
    )


def _naming(report: Report, file: ConfigFile, entries: Entries, folder: Any) -> rules.Rule:
    """Return the rule of a key that names data sets."""

    def named(value: Any) -> RuleResult:
        missing = [name for name in rules.names(value) if name not in entries]
        if report.request.data:
            return outcome("ignored --data replaces it")
        if folder == "ONLINE" or not missing:
            return outcome("ignored the keys of each data set say it")
        if entries:
            hint = did_you_mean(missing[0], [*entries])
            return outcome(f"refused {INFO} has no entry {missing[0]!r} !! {hint}".rstrip())
        where = f"{folder if isinstance(folder, str) else 'data'}/{INFO}"
        hint = f"give it too: pipe import {file.path} {where}"
        return outcome(f"refused names entries of {INFO} !! {hint}")

    return named


def _weights(content: dict[str, Any]) -> Table:
    """Return the rules for the share of each data set, and give them a key each in the content."""
    value = content.get(PROBS)
    shares = value.split(",") if isinstance(value, str) else value
    if not isinstance(shares, list) or not shares:
        return {PROBS: rule(f"refused must be a list of shares, not {value!r}")} if value else {}
    del content[PROBS]
    content |= {f"{PROBS}[{number}]": share for number, share in enumerate(shares)}
    return {f"{PROBS}[{number}]": rule(f"{TRAIN}{number}.weight number")
            for number in range(len(shares))}  # fmt: skip


ENTRY = table("""
    hf_hub_url: .path | subset: .config | split: .split
    ms_hub_url om_hub_url script_url cloud_file_name:
        refused data comes from files and the hub of Hugging Face -- download it
    formatting: .style styles !! use alpaca or sharegpt
    folder num_samples: refused files are read as a whole -- write those rows to a separate file
    ranking columns.chosen columns.rejected columns.kto_tag:
        refused training on preferences is not supported by recipes !!
    [columns]
    prompt: always instruction !! rename the column in the data
    query: always input !! rename the column in the data
    response: always output !! rename the column in the data
    history: always history !! rename the column in the data
    system: always system !! rename the column in the data
    tools: always tools !! rename the column in the data
    messages: .form conversations=sharegpt !! rename the column in the data
    images videos audios: refused recipes train on text only !!
""", styles=STYLES)  # fmt: skip
"""Keys of an entry in dataset_info.json."""
OPENAI = table("messages: .form messages, conversations=sharegpt !! rename the column in the data")
RUNNING = table("formatting: ignored stage: pt takes the text | prompt: .text_key")


def _rows(
    report: Report, entry: Mapping[str, Any], one: str, folder: str, *, running: bool
) -> Table:
    """Return the rules of an entry, and set its defaults. `running` text is trained on as it is."""
    style = Style(running=True) if running else STYLES["alpaca"]
    report.default(f"{one}style", style, "stage: pt" if running else OWN)
    shape = ("text_key", "instruction") if running else ("form", "sharegpt")
    report.default(f"{one}{shape[0]}", shape[1], OWN)
    given = entry.get("tags")
    openai = isinstance(given, Mapping) and given.get("role_tag") == "role"
    tags = TAGS["messages" if openai else "sharegpt"].items()
    mirror = rule("ignored is also on the hub of Hugging Face")
    prompt = {"prompt": RUNNING["prompt"]} if running else {}
    return {
        **ENTRY,
        **(dict.fromkeys(("ms_hub_url", "om_hub_url"), mirror) if "hf_hub_url" in entry else {}),
        **({"formatting": RUNNING["formatting"]} if running else {}),
        "file_name": sets(".path", lambda name: str(Path(folder, name).absolute())),
        "columns": {**ENTRY["columns"], **(OPENAI if openai else {}), **prompt},
        "tags": {key: rule(f"always {tag} !! rename it in the data") for key, tag in tags},
    }
