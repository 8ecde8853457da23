"""LLaMA-Factory's recipes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        content, name = file.content, file.path.name
        running = content.get("stage") == "pt"
        rows = {
            **TABLE,
            **unread(("template", running and content.get("template"),
                      "stage: pt takes the text as it is")),
            **purpose(content, "do_predict", "predict_with_generate", "do_eval"),
            **trainer(report, file),
        }  # fmt: skip
        sets = _DataSets(report, file, running=running)
        for key, value in content.items():
            if key in NAMES and value:
                sets.name(key, value, replaced=bool(report.request.data))
            elif key == PROBS and value and sets.interleaved:
                sets.weigh(value)
            else:
                report.read(name, {key: value}, rows)
        sets.read()
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


def _is_info(content: Mapping[str, Any]) -> bool:
    """Return whether it is the content of a dataset_info.json."""
    entries = content.values()
    return bool(entries) and all(
        isinstance(entry, Mapping) and ADDRESSES & entry.keys() for entry in entries
    )


ENTRY = table(
    """
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
""",
    styles=STYLES,
)
"""Keys of an entry in dataset_info.json."""
OPENAI = table("messages: .form messages, conversations=sharegpt !! rename the column in the data")
RUNNING = table("formatting: ignored stage: pt takes the text | prompt: .text_key")
MIRROR = rule("ignored is also on the hub of Hugging Face")


def _table(entry: Mapping[str, Any], folder: str, *, running: bool) -> Table:
    """Return the rules of an entry. `running` text is trained on as it is."""
    given = entry.get("tags")
    openai = isinstance(given, Mapping) and given.get("role_tag") == "role"
    tags = TAGS["messages" if openai else "sharegpt"].items()
    own: dict[str, Any] = {
        "file_name": sets(".path", lambda name: str(Path(folder, name).absolute())),
        "columns": ENTRY["columns"] | (OPENAI if openai else {}),
        "tags": {key: rule(f"always {tag} !! rename it in the data") for key, tag in tags},
    }  # fmt: skip
    if "hf_hub_url" in entry:
        own |= {"ms_hub_url": MIRROR, "om_hub_url": MIRROR}
    if running:
        own["formatting"] = RUNNING["formatting"]
        own["columns"] |= {"prompt": RUNNING["prompt"]}
    return {**ENTRY, **own}


class _DataSets:
    """The data sets that a recipe names."""

    def __init__(self, report: Report, file: ConfigFile, *, running: bool) -> None:
        self.report, self.file, self.running = report, file, running
        folder = file.content.get("dataset_dir", "data")
        self.online = folder == "ONLINE"
        self.folder = folder if isinstance(folder, str) else "data"
        inline = folder if isinstance(folder, Mapping) else {}
        infos = [(each.path.name, each.content) for each in report.files]
        files = [(file.path.name, inline), *(each for each in infos if _is_info(each[1]))]
        self.entries = {
            name: (file, entry)
            for file, content in files
            for name, entry in content.items()
            if isinstance(entry, Mapping)
        }
        """Name -> file that has the entry, and the entry."""
        self.named: list[tuple[str, str]] = []
        """Name and beginning of the facts of each data set."""
        self.interleaved = str(file.content.get("mix_strategy")) == "interleave_over"

    def name(self, key: str, value: Any, *, replaced: bool) -> None:
        """Enter a key that names data sets."""
        self._enter(key, value, lambda value: self._found(rules.names(value), replaced=replaced))
        with contextlib.suppress(rules.WrongValueError):
            names = rules.names(value)
            self.named += [(one, f"{NAMES[key]}{number}.") for number, one in enumerate(names)]

    def _found(self, names: list[str], *, replaced: bool) -> RuleResult:
        missing = [name for name in names if name not in self.entries]
        if replaced:
            return outcome("ignored --data replaces it")
        if self.online or not missing:
            return outcome("ignored the keys of each data set say it")
        if self.entries:
            hint = did_you_mean(missing[0], [*self.entries])
            return outcome(f"refused {INFO} has no entry {missing[0]!r} !! {hint}".rstrip())
        hint = f"give it too: pipe import {self.file.path} {self.folder}/{INFO}"
        return outcome(f"refused names entries of {INFO} !! {hint}")

    def weigh(self, value: Any) -> None:
        """Read the share of each data set."""
        shares = value.split(",") if isinstance(value, str) else value
        if not isinstance(shares, list):
            wrong = rule(f"refused must be a list of shares, not {value!r}")
            self._enter(PROBS, value, wrong)
            return
        for number, share in enumerate(shares):
            self._enter(f"{PROBS}[{number}]", share, rule(f"{TRAIN}{number}.weight number"))

    def read(self) -> None:
        """Read the data sets that are named, and enter those that are not."""
        for name, one in self.named:
            if self.interleaved and one.startswith(TRAIN):
                self.report.default(f"{one}weight", 1.0, "interleave_over takes turns")
            if self.online:
                self.report.default(f"{one}path", name, f"dataset in {self.file.path.name}")
                self._read(name, "", {}, one)
            elif name in self.entries:
                self._read(name, *self.entries[name], one)
        used = {name for name, _ in self.named}
        other = "ignored the recipe names other data sets"
        for name, (file, entry) in self.entries.items():
            if name not in used:
                self.report.enter(file, name, entry, outcome(other))

    def _read(self, name: str, file: str, entry: Mapping[str, Any], one: str) -> None:
        if self.running:
            self.report.default(f"{one}style", Style(running=True), "stage: pt")
            self.report.default(f"{one}text_key", "instruction", OWN)
        else:
            self.report.default(f"{one}style", STYLES["alpaca"], OWN)
            self.report.default(f"{one}form", "sharegpt", OWN)
        rows = _table(entry, self.folder, running=self.running)
        self.report.read(file, entry, rows, f"{name}.", one)

    def _enter(self, key: str, value: Any, rule: rules.Rule) -> None:
        self.report.enter(self.file.path.name, key, value, rules.applied(rule, value))
