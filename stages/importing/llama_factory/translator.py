"""LLaMA-Factory's recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.importing import ConfigFile, Request
from stages.importing import rules
from stages.importing.llama_factory import rows
from stages.importing.llama_factory.keys import TABLE
from stages.importing.reader import Reader
from stages.importing.report import Report
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
        return INFO_KIND if rows.is_info(content) else super().kind(content)

    def read(self, reader: Reader, others: Sequence[ConfigFile], request: Request) -> None:
        given, report = dict(reader.content), reader.report
        running = given.get("stage") == "pt"
        if running and given.get("template"):
            reader.skip("template", "stage: pt takes the text as it is")
        reader.purpose("do_predict", "predict_with_generate", "do_eval")
        reader.trainer()
        infos = [each for each in others if rows.is_info(each.content)]
        sets = rows.DataSets(reader, infos, running=running)
        for key, value in reader.content.items():
            if key in rows.NAMES and value:
                sets.name(key, value, replaced=bool(request.data))
            elif key == rows.PROBS and value and sets.interleaved:
                sets.weigh(value)
            else:
                report.read(reader.name, {key: value}, TABLE)
        sets.read()
        report.set_defaults(DEFAULTS, TABLE, rows.OWN)
        rank = report.value("adapter.rank")
        report.default("adapter.alpha", float(2 * rank), "twice lora_rank, LLaMA-Factory's default")
        report.default("data.loss", "assistant", "LLaMA-Factory trains on what the assistant says")
        if rules.is_off(given.get("disable_gradient_checkpointing")):
            report.default("model.activation_checkpointing", {}, rows.OWN)
        if report.given("precision.master"):
            report.default("precision.compute", "bf16", "pure_bf16 in the recipe")
        _lengths(report, running=running)


def _lengths(report: Report, *, running: bool) -> None:
    """Decide what is packed, and how long a sample is."""
    neat = report.value("neat", False)
    packed = neat or report.value("packing", False)
    length = report.value("cutoff") - (1 if packed else 0)
    for entry in report.of("cutoff"):
        entry.content = length
    why = "LLaMA-Factory packs one token less than cutoff_len" if packed else rows.OWN
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
