"""torchtune's recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.importing import ConfigFile, Request
from stages.importing import rules
from stages.importing.reader import Reader
from stages.importing.report import Draft, Report
from stages.importing.rules import Table
from stages.importing.sources import HELD, TRAIN
from stages.importing.tools import COMPONENT, TORCHTUNE
from stages.importing.torchtune.keys import COSINE, TOP, logger, read_model, strict
from stages.importing.torchtune.rows import read_set, take_template
from stages.importing.trainer import template_setting
from stages.importing.translator import RecipeTranslator

SETS = {"dataset": TRAIN, "dataset_val": HELD}
"""Keys with data sets -> beginning of their facts."""
STRICT = ("optimizer", "lr_scheduler", "loss")
"""Blocks whose keys all change the training."""
DEFAULTS: Mapping[str, Any] = {
    "gradient_accumulation_steps": 1, "log_every_n_steps": 1, "shuffle": True,
}  # fmt: skip
SINGLE = "single_device"
"""Part of the name of files for one device. The recipes for several have the same keys."""


class Torchtune(RecipeTranslator):
    """A recipe of torchtune for full_finetune or lora_finetune."""

    name = "torchtune"
    tool = TORCHTUNE
    table = TOP
    companies = ({}, {"lr_scheduler": {COMPONENT: COSINE}})
    beside = ()
    signs = "a recipe of torchtune has blocks with `_component_`"

    def read(self, reader: Reader, others: Sequence[ConfigFile], request: Request) -> None:
        report, file = reader.report, reader.name
        content = resolved(reader.content, report, file)
        for key, value in content.items():
            if key == "model" and isinstance(value, Mapping):
                read_model(report, file, value)
            elif key in SETS and value:
                _read_sets(report, file, key, content)
            else:
                report.read(file, {key: value}, {**TOP, **_block(key, value, content)})
        report.set_defaults(DEFAULTS, TOP, "torchtune's default")
        _defaults(report)
        single = SINGLE in file if request.procs is None else request.procs == 1
        use = "wrap.ddp" if single else "wrap.fsdp"
        report.default("strategy", use, f"for {'one device' if single else 'several devices'}")
        if single and request.procs is None:
            report.default("procs", 1, f"{SINGLE} in the name of the file")

    def finish(self, draft: Draft) -> None:
        if draft.given("export.adapter") and "adapter" in draft.slots:
            draft.slot("export", "export.adapter", "export.adapter")
        if draft.slots["train"].get("epochs") != 1:
            draft.put("checkpoint.every", "1 epoch", note="torchtune saves after each epoch")
        if not draft.known("data.sequence_length"):
            what = "tokens of the longest row; torchtune cuts none without max_seq_len"
            draft.lacks("data.sequence_length", what)


def _block(key: str, value: Any, content: Mapping[str, Any]) -> Table:
    """Return the table of a block whose keys depend on a component."""
    rule = TOP.get(key)
    if not isinstance(value, Mapping) or not isinstance(rule, Mapping):
        return {}
    if key in STRICT:
        return {key: strict(value, rule)}
    named = [content.get(each) for each in SETS]
    sets = [one for each in named for one in (each if isinstance(each, list) else [each])]
    if key == "tokenizer" and take_template(sets, value):
        return {key: {**rule, COMPONENT: template_setting}}
    return {key: logger(value)} if key == "metric_logger" else {}


def _read_sets(report: Report, file: str, key: str, content: Mapping[str, Any]) -> None:
    value = content[key]
    for number, block in enumerate(value if isinstance(value, list) else [value]):
        name = f"{key}[{number}]" if isinstance(value, list) else key
        if isinstance(block, Mapping):
            one = f"{SETS[key]}{number}."
            read_set(report, file, name, block, one, content.get("tokenizer"))
        else:
            report.enter(file, name, block, rules.refused("must be a block of keys", blocks=True))


def _defaults(report: Report) -> None:
    report.default("optimizer.decay_all", True, "torch decays every parameter")
    report.default("optimizer.max_grad_norm", None, "torchtune does not clip")
    report.default("schedule", "flat", "without lr_scheduler, the rate stays")
    report.default("checkpoint.keep", None, "torchtune keeps all")
    report.default("data.documents_apart", True, "torchtune masks other rows")
    if not report.given("data.sequence_length"):
        report.default("data.too_long", "error", "torchtune cuts no row")
    dtype = report.value("precision.compute", "fp32")
    if dtype != "fp32":
        for field in ("master", "reduce"):
            report.default(f"precision.{field}", dtype, "torchtune has one dtype for everything")
    steps = report.value("cap", 0) * report.value("train.epochs", 1)
    why = "epochs x steps, if an epoch has so many"
    report.rename("cap", "train.steps", content=int(steps) or None, why=why)


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
DEPTH = 10
"""Most references that follow one another."""


def resolved(content: Mapping[str, Any], report: Report, file: str) -> dict[str, Any]:
    """Return the content with the values that OmegaConf's references (`${output_dir}/logs`) name.
    Keys with references to something outside the file are entered as refused, and left out."""

    def block(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in values.items():
            new = each(value, f"{prefix}{key}")
            if isinstance(new, str) and "${" in new:
                why, hint = "refers to something outside the file", "write the value itself"
                report.enter(file, f"{prefix}{key}", value, rules.refused(why, hint))
            else:
                found[key] = new
        return found

    def each(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return block(value, f"{name}.")
        if isinstance(value, list):
            return [each(one, f"{name}[{index}]") for index, one in enumerate(value)]
        return _value(value, content)

    return block(content, "")


def _value(value: Any, content: Mapping[str, Any]) -> Any:
    """Return the value that references lead to, as far as the content has it."""
    for _ in range(DEPTH):
        if not isinstance(value, str) or not (match := _REFERENCE.search(value)):
            return value
        found: Any = content
        for part in match[1].split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is None or isinstance(found, Mapping | list):
            return value
        whole = match.span() == (0, len(value))
        value = found if whole else f"{value[: match.start()]}{found}{value[match.end() :]}"
    return value
