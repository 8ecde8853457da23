"""torchtune's recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.importing import ConfigFile, Request
from stages.importing import rules
from stages.importing.report import NO_BLOCK, Draft, Report
from stages.importing.rules import Table, outcome, rule, table, truth
from stages.importing.sources import HELD, TRAIN, Style
from stages.importing.tools import COMPONENT, TORCHTUNE
from stages.importing.torchtune.keys import COSINE, PLAIN, TOP, family, logger, read_model, strict
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

    def read(
        self, report: Report, file: ConfigFile, others: Sequence[ConfigFile], request: Request
    ) -> None:
        name = file.path.name
        content = _resolved(file.content, report, name)
        for key, value in content.items():
            if key == "model" and isinstance(value, Mapping):
                read_model(report, name, value)
            elif key in SETS and value:
                _read_sets(report, name, key, content)
            else:
                report.read(name, {key: value}, {**TOP, **_block(key, value, content)})
        report.set_defaults(DEFAULTS, TOP, "torchtune's default")
        _defaults(report)
        single = SINGLE in name if request.procs is None else request.procs == 1
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
    blocks = [one for each in named for one in (each if isinstance(each, list) else [each])]
    if key == "tokenizer" and _take_template(blocks, value):
        return {key: {**rule, COMPONENT: template_setting}}
    return {key: logger(value)} if key == "metric_logger" else {}


def _read_sets(report: Report, file: str, key: str, content: Mapping[str, Any]) -> None:
    value = content[key]
    for number, block in enumerate(value if isinstance(value, list) else [value]):
        name = f"{key}[{number}]" if isinstance(value, list) else key
        if isinstance(block, Mapping):
            one = f"{SETS[key]}{number}."
            _read_set(report, file, name, block, one, content.get("tokenizer"))
        else:
            report.enter(file, name, block, outcome(f"{NO_BLOCK} !!"))


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


PACKAGE = "torchtune.datasets."
_RENAME = "rename the columns in the data"
UNREAD = ("refused data.chat and data.text do not read such rows !! use instruct_dataset, "
          "chat_dataset or text_completion_dataset, with a source")  # fmt: skip
TURN = ("refused torchtune puts Alpaca's prompt into a turn of the chat template -- data.template: "
        "true takes only the chat template, false only Alpaca's prompt")  # fmt: skip
COLUMNS_DIFFER = ("refused its rows have `input` and `output`, and data.chat reads `prompt` and "
                  f"`completion` -- {_RENAME}")  # fmt: skip
COLUMNS = {"sharegpt": "conversations", "openai": "messages"}
"""Style of a conversation -> column of data.chat."""
PAIRS = {"input": "prompt", "output": "completion"}
"""Columns of instruct_dataset -> those of data.chat."""
ALPACA = {"instruction": "instruction", "input": "input", "output": "output"}


class _Builder(NamedTuple):
    """A builder of data sets, and what it does unless told."""

    kind: str
    source: str = ""
    loss: str = "assistant"


BUILDERS = {
    "alpaca_dataset": _Builder("alpaca", "tatsu-lab/alpaca", loss="all"),
    "alpaca_cleaned_dataset": _Builder("alpaca", "yahma/alpaca-cleaned", loss="all"),
    "instruct_dataset": _Builder("instruct"),
    "chat_dataset": _Builder("chat"),
    "slimorca_dataset": _Builder("slimorca", "Open-Orca/SlimOrca-Dedup"),
    "text_completion_dataset": _Builder("text", loss="all"),
}


def _builder(block: Mapping[str, Any]) -> _Builder | None:
    """Return the builder that a block names; None if it is not one of those known here."""
    return BUILDERS.get(str(block.get(COMPONENT, "")).removeprefix(PACKAGE))


def _plain(tokenizer: Any) -> bool:
    """Return whether a tokenizer puts nothing around messages."""
    block = tokenizer if isinstance(tokenizer, Mapping) else {}
    return family(block.get(COMPONENT)) in PLAIN and not block.get("prompt_template")


def _take_template(blocks: list[Any], tokenizer: Any) -> bool:
    """Return whether torchtune lays out rows of these data sets by the tokenizer's format."""
    made = [_builder(block) for block in blocks if isinstance(block, Mapping)]
    kinds = {each.kind for each in made if each}
    return bool(kinds & {"chat", "slimorca"}) or ("instruct" in kinds and not _plain(tokenizer))


def _read_set(
    report: Report, file: str, key: str, block: Mapping[str, Any], one: str, tokenizer: Any
) -> None:
    """Read a data set whose facts begin with `one`."""
    made = _builder(block)
    if made is None:
        others = dict.fromkeys(block, rule(f"ignored follows {COMPONENT}"))
        report.read(file, block, {**others, COMPONENT: _says(UNREAD)}, f"{key}.")
        return
    plain = _plain(tokenizer)
    # Text is cut where a sample is full.
    running = made.kind == "text" and bool(
        block.get("packed") and block.get("split_across_pack", 1)
    )
    forms = {"alpaca": "alpaca", "instruct": "prompt/completion", "slimorca": "sharegpt"}
    style = Style(form=forms.get(made.kind), template=not plain)
    if made.kind == "text":
        style = Style(running=True) if running else Style(form="text")
    if made.source:
        report.default(f"{one}path", made.source, f"{key}.{COMPONENT} in {file}")
    report.default("data.loss", made.loss, "torchtune's default")
    report.default(f"{one}style", style, f"{key}.{COMPONENT} in {file}")
    own = SHARED_KEYS | _own(made.kind, block, plain=plain, running=running)
    report.read(file, block, strict(block, own), f"{key}.", one)


SHARED_KEYS = table("""
    _component_: ignored its settings are in the slot data
    source: .path | data_files: .files names | split: .split | name subset: .config
    revision: .revision | packed: data.packing truth | new_system_prompt: @template_setting
    train_on_input: data.loss targets
""", template_setting=template_setting,
    targets=lambda value: "all" if truth(value) else "assistant")  # fmt: skip
"""Keys of every data set."""
CHAT = table("conversation_style: .form sharegpt, openai=messages !!")
RUNNING = table("""
    column: .text_key | add_eos: data.append_eos truth
    split_across_pack: ignored data.text cuts rows, data.chat does not
""")


def _own(kind: str, block: Mapping[str, Any], *, plain: bool, running: bool) -> dict[str, Any]:
    """Return the rules for the keys that only one kind of builder has."""
    if kind == "alpaca":
        return {"column_map": _columns(ALPACA), **({} if plain else {COMPONENT: _says(TURN)})}
    if kind == "instruct":
        own = {} if block.get("column_map") else {COMPONENT: _says(COLUMNS_DIFFER)}
        return {"column_map": _columns(PAIRS), **own}
    if kind == "chat":
        column = COLUMNS.get(str(block.get("conversation_style")), "messages")
        return {**CHAT, "conversation_column": _column(column)}
    if kind == "text":
        return RUNNING | (
            {} if running else {"column": _column("text"), "add_eos": rule("always true")}
        )
    return {}


def _says(text: str) -> rules.Rule:
    return lambda value: outcome(text)


def _column(name: str) -> rules.Rule:
    passed = "ignored data.chat reads this column"
    return rules.only(lambda value: value == name, passed,
                      f"refused data.chat reads the column {name!r} !! {_RENAME}")  # fmt: skip


def _columns(names: Mapping[str, str]) -> rules.Rule:
    def same(value: Any) -> bool:
        return {**names, **(value if isinstance(value, Mapping) else {})} == names

    refused = f"refused data.chat reads {', '.join(names.values())} !! {_RENAME}"
    return rules.only(same, "ignored data.chat reads these columns", refused)


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
DEPTH = 10
"""Most references that follow one another."""


def _resolved(content: Mapping[str, Any], report: Report, file: str) -> dict[str, Any]:
    """Return the content with the values that OmegaConf's references (`${output_dir}/logs`) name.
    Keys with references to something outside the file are entered as refused, and left out."""

    def block(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in values.items():
            new = each(value, f"{prefix}{key}")
            if isinstance(new, str) and "${" in new:
                why = "refused refers to something outside the file -- write the value itself"
                report.enter(file, f"{prefix}{key}", value, outcome(why))
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
