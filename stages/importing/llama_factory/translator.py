"""LLaMA-Factory's recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.importing import ConfigFile, Request
from stages.importing import rules
from stages.importing.llama_factory import rows
from stages.importing.llama_factory.keys import TABLE
from stages.importing.llama_factory.rows import OWN
from stages.importing.reader import Reader
from stages.importing.recipe_translator import RecipeTranslator
from stages.importing.report import Report
from stages.importing.rules import RuleResult, refused
from stages.importing.sources import HELD, TRAIN
from stages.importing.tools import LLAMA_FACTORY

DEFAULTS: Mapping[str, Any] = {
    "finetuning_type": "lora", "lora_rank": 8, "lora_dropout": 0.0, "lora_target": "all",
    "cutoff_len": 2048,
}  # fmt: skip
"""Defaults of LLaMA-Factory that differ from the recipe's."""
INFO_KIND = "data sets of LLaMA-Factory"
NAMES = {"dataset": TRAIN, "eval_dataset": HELD}
"""Keys with names of data sets -> beginning of their facts."""
PROBS = "interleave_probs"


class LlamaFactory(RecipeTranslator):
    """A recipe of LLaMA-Factory, with its dataset_info.json and the DeepSpeed JSON of its own."""

    name = "llama_factory"
    tool = LLAMA_FACTORY
    signs = "a recipe of LLaMA-Factory has `finetuning_type` or `cutoff_len`"
    table = TABLE
    companies = ({}, {"eval_strategy": "steps"})

    def kind(self, content: Mapping[str, Any]) -> str | None:
        return INFO_KIND if rows.is_info(content) else super().kind(content)

    def read(
        self, reader: Reader, recipe: ConfigFile, others: Sequence[ConfigFile], request: Request
    ) -> None:
        content = dict(recipe.content)
        running = content.get("stage") == "pt"
        if running and content.get("template"):
            reader.skip(recipe, content, "template", "stage: pt takes the text as it is")
        reader.purpose(recipe, content, "do_predict", "predict_with_generate", "do_eval")
        reader.trainer(recipe, content)
        report, file = reader.report, recipe.path.name
        sets = _DataSets(reader, recipe, [each for each in others if rows.is_info(each.content)])
        for key, value in content.items():
            if key in NAMES and value:
                sets.name(key, value, replaced=bool(request.data))
            elif key == PROBS and value and sets.interleaved:
                sets.weigh(value)
            else:
                report.read(file, {key: value}, TABLE)
        sets.read()
        reader.defaults(DEFAULTS, TABLE, OWN)
        _defaults(report, recipe.content)
        _lengths(report, running=running)


class _DataSets:
    """The data sets that a recipe names."""

    def __init__(self, reader: Reader, recipe: ConfigFile, infos: Sequence[ConfigFile]) -> None:
        self.report = reader.report
        self.recipe = recipe
        folder = recipe.content.get("dataset_dir", "data")
        self.online = folder == "ONLINE"
        self.folder = folder if isinstance(folder, str) else "data"
        self.entries: dict[str, tuple[str, Any]] = {}
        """Name -> file that has the entry, and the entry."""
        inline = folder if isinstance(folder, Mapping) else {}
        for file, content in [(recipe.path.name, inline)] + [
            (info.path.name, info.content) for info in infos
        ]:
            self.entries.update(
                (name, (file, entry))
                for name, entry in content.items()
                if isinstance(entry, Mapping)
            )
        self.named: list[tuple[str, str]] = []
        """Name and beginning of the facts of each data set."""
        self.running = recipe.content.get("stage") == "pt"
        self.interleaved = str(recipe.content.get("mix_strategy")) == "interleave_over"

    def name(self, key: str, value: Any, *, replaced: bool) -> None:
        """Enter a key that names data sets."""
        try:
            names = rules.names(value)
        except rules.WrongValueError as error:
            self._enter(key, value, error.result)
            return
        self._enter(key, value, self._outcome(names, replaced=replaced))
        self.named += [(name, f"{NAMES[key]}{number}.") for number, name in enumerate(names)]

    def read(self) -> None:
        """Read the data sets that are named, and enter those that are not."""
        for name, one in self.named:
            place = rows.Place(one=one, folder=self.folder, running=self.running)
            if self.interleaved and one.startswith(TRAIN):
                self.report.default(f"{one}weight", 1.0, "interleave_over takes turns")
            if self.online:
                self.report.default(f"{one}path", name, f"dataset in {self.recipe.path.name}")
                rows.read_entry(self.report, "", name, {}, place)
            elif name in self.entries:
                file, entry = self.entries[name]
                rows.read_entry(self.report, file, name, entry, place)
        used = {name for name, _ in self.named}
        for name, (file, entry) in self.entries.items():
            if name not in used:
                result = RuleResult(outcome="default", why="the recipe names other data sets")
                self.report.enter(file, name, entry, result)

    def _outcome(self, names: list[str], *, replaced: bool) -> RuleResult:
        missing = [name for name in names if name not in self.entries]
        if replaced:
            return RuleResult(outcome="default", why="--data replaces it")
        if self.online or not missing:
            return RuleResult(outcome="default", why="the keys of each data set say it")
        if self.entries:
            return rows.unknown(missing[0], self.entries)
        info = f"{self.folder}/{rows.INFO}"
        hint = f"give it too: pipe import {self.recipe.path} {info}"
        return refused(f"names entries of {rows.INFO}", hint, blocks=True)

    def weigh(self, value: Any) -> None:
        """Read the share of each data set."""
        shares = value.split(",") if isinstance(value, str) else value
        if not isinstance(shares, list):
            self._enter(PROBS, value, refused(f"must be a list of shares, not {value!r}"))
            return
        for number, share in enumerate(shares):
            rule = rules.sets(f"{TRAIN}{number}.weight", rules.number)
            self._enter(f"{PROBS}[{number}]", share, rules.applied(rule, share))

    def _enter(self, key: str, value: Any, result: RuleResult) -> None:
        self.report.enter(self.recipe.path.name, key, value, result)


def _defaults(report: Report, content: Mapping[str, Any]) -> None:
    rank = report.value("adapter.rank")
    report.default("adapter.alpha", float(2 * rank), "twice lora_rank, LLaMA-Factory's default")
    report.default("data.loss", "assistant", "LLaMA-Factory trains on what the assistant says")
    if rules.is_off(content.get("disable_gradient_checkpointing")):
        report.default("model.activation_checkpointing", {}, OWN)
    if report.given("precision.master"):
        report.default("precision.compute", "bf16", "pure_bf16 in the recipe")


def _lengths(report: Report, *, running: bool) -> None:
    """Decide what is packed, and how long a sample is."""
    neat = report.value("neat", False)
    packed = neat or report.value("packing", False)
    length = report.value("cutoff") - (1 if packed else 0)
    for entry in report.of("cutoff"):
        entry.content = length
    why = "LLaMA-Factory packs one token less than cutoff_len" if packed else OWN
    report.rename("cutoff", "data.sequence_length")
    report.default("data.sequence_length", length, why)
    if running:
        report.default("data.prepend_bos", False, "LLaMA-Factory joins texts without a start token")
        if report.given("packing") and not packed:
            hint = "leave packing out"
            report.refuse("packing", why="data.text joins the rows of a text", hint=hint)
    elif neat:
        report.rename("neat", "data.packing")
        report.ignore("packing", why="follows neat_packing")
    elif packed:
        why = "rows of one sample never see each other"
        report.refuse("packing", why=why, hint="set neat_packing: true")
