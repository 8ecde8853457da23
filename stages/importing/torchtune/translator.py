"""torchtune's recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipeline.importing import ConfigFile
from stages.importing.draft import NO_BLOCK, Draft, Rows
from stages.importing.rules import Rule, Table, outcome, rule, table, truth
from stages.importing.sources import HELD, TRAIN, Style
from stages.importing.tools import COMPONENT, TORCHTUNE
from stages.importing.torchtune import keys
from stages.importing.trainer import template_setting
from stages.importing.translator import RecipeTranslator

SETS = {"dataset": TRAIN, "dataset_val": HELD}
"""Keys with data sets -> beginning of their facts."""
DEFAULTS: Mapping[str, Any] = {
    "gradient_accumulation_steps": 1, "log_every_n_steps": 1, "shuffle": True,
}  # fmt: skip
OWN = "torchtune's default"
SINGLE = "single_device"
"""Part of the name of files for one device. The recipes for several have the same keys."""


class Torchtune(RecipeTranslator):
    """A recipe of torchtune for full_finetune or lora_finetune."""

    name = "torchtune"
    tool = TORCHTUNE
    table = keys.TOP
    companies = ({}, {"lr_scheduler": {COMPONENT: keys.COSINE}})
    beside = ()
    signs = "a recipe of torchtune has blocks with `_component_`"

    def read(self, draft: Draft, file: ConfigFile) -> None:
        name = file.path.name
        content = _resolved(file.content, draft, name)
        tokenizer: Any = content.get("tokenizer")
        plain = keys.family(tokenizer) in keys.PLAIN and not tokenizer.get("prompt_template")

        def rows(block: Mapping[str, Any], one: str, key: str) -> Table:
            return _rows(draft, block, one, f"{key}.{COMPONENT} in {name}", plain=plain)

        fused = keys.family(content.get("model")) in keys.FUSED
        own: dict[str, Any] = {
            "metric_logger": keys.logger(content.get("metric_logger")),
            "model": keys.MODEL_FUSED if fused else keys.MODEL,
            **{key: Rows(kind, rows, f"{NO_BLOCK} !!") for key, kind in SETS.items()},
        }
        if _takes_template(content, plain=plain):
            own["tokenizer"] = {**keys.TOP["tokenizer"], COMPONENT: template_setting}
        draft.read(name, content, {**keys.TOP, **own})
        if "model" in content:
            keys.set_adapter(draft, name, content["model"])
        draft.set_defaults(DEFAULTS, keys.TOP, OWN)
        _defaults(draft)
        procs = draft.request.procs
        single = SINGLE in name if procs is None else procs == 1
        use = "wrap.ddp" if single else "wrap.fsdp"
        draft.default("strategy", use, f"for {'one device' if single else 'several devices'}")
        named = single and procs is None
        draft.default("procs", 1, f"{SINGLE} in the name of the file", when=named)

    def finish(self, draft: Draft) -> None:
        if draft.given("export.adapter") and "adapter" in draft.slots:
            draft.slot("export", "export.adapter", "export.adapter")
        if draft.slots["train"].get("epochs") != 1:
            draft.put("checkpoint.every", "1 epoch", note="torchtune saves after each epoch")
        what = "tokens of the longest row; torchtune cuts none without max_seq_len"
        draft.lacks("data.sequence_length", what)


def _defaults(draft: Draft) -> None:
    draft.default("optimizer.decay_all", True, "torch decays every parameter")
    draft.default("optimizer.max_grad_norm", None, "torchtune does not clip")
    draft.default("schedule", "flat", "without lr_scheduler, the rate stays")
    draft.default("checkpoint.keep", None, "torchtune keeps all")
    draft.default("data.documents_apart", True, "torchtune masks other rows")
    if not draft.given("data.sequence_length"):
        draft.default("data.too_long", "error", "torchtune cuts no row")
    dtype = draft.value("precision.compute", "fp32")
    for field in ("master", "reduce") if dtype != "fp32" else ():
        draft.default(f"precision.{field}", dtype, "torchtune has one dtype for everything")
    steps = draft.value("cap", 0) * draft.value("train.epochs", 1)
    why = "epochs x steps, if an epoch has so many"
    draft.rename("cap", "train.steps", content=int(steps) or None, why=why)


BUILDERS = {
    "alpaca_dataset": ("alpaca", "all", "tatsu-lab/alpaca"),
    "alpaca_cleaned_dataset": ("alpaca", "all", "yahma/alpaca-cleaned"),
    "instruct_dataset": ("instruct", "assistant", ""),
    "chat_dataset": ("chat", "assistant", ""),
    "slimorca_dataset": ("slimorca", "assistant", "Open-Orca/SlimOrca-Dedup"),
    "text_completion_dataset": ("text", "all", ""),
}
"""Builder of data sets -> kind, loss and data set of the hub, unless told otherwise."""
FORMS = {"alpaca": "alpaca", "instruct": "prompt/completion", "slimorca": "sharegpt"}
COLUMNS = {"sharegpt": "conversations", "openai": "messages"}
"""Style of a conversation -> column of data.chat."""
PAIRS = {"input": "prompt", "output": "completion"}
"""Columns of instruct_dataset -> those of data.chat."""
ALPACA = {"instruction": "instruction", "input": "input", "output": "output"}
EVERY = table("""
    _component_: ignored its settings are in the slot data | source: .path
    data_files: .files names | split revision: .* | name subset: .config
    packed: data.packing truth | new_system_prompt: @template_setting
    train_on_input: data.loss targets | *: refused no recipe has this argument !!
""", template_setting=template_setting,
    targets=lambda value: "all" if truth(value) else "assistant")  # fmt: skip
"""Keys of every data set."""
UNKNOWN = table("""
    _component_: never data.chat and data.text do not read such rows !! use instruct_dataset, \
        chat_dataset or text_completion_dataset, with a source
    *: ignored follows _component_
""")
RUNNING = table("""
    column: .text_key | add_eos: data.append_eos truth
    split_across_pack: ignored data.text cuts rows, data.chat does not
""")


def _kind(block: Any) -> str:
    """Return the kind of a data set, empty if its builder is not one of those known here."""
    name = block.get(COMPONENT, "") if isinstance(block, Mapping) else ""
    return BUILDERS.get(str(name).removeprefix("torchtune.datasets."), ("",))[0]


def _takes_template(content: Mapping[str, Any], *, plain: bool) -> bool:
    """Return whether torchtune lays out rows of the data sets by the tokenizer's format."""
    named = [content.get(key) for key in SETS]
    kinds = {_kind(one) for each in named for one in (each if isinstance(each, list) else [each])}
    return bool(kinds & {"chat", "slimorca"}) or ("instruct" in kinds and not plain)


def _rows(draft: Draft, block: Mapping[str, Any], one: str, here: str, *, plain: bool) -> Table:
    """Return the rules of a data set whose facts begin with `one`, and set its defaults."""
    kind = _kind(block)
    if not kind:
        return UNKNOWN
    _, loss, source = BUILDERS[str(block[COMPONENT]).removeprefix("torchtune.datasets.")]
    # Text is cut where a sample is full.
    running = kind == "text" and bool(block.get("packed") and block.get("split_across_pack", 1))
    style = Style(form=FORMS.get(kind), template=not plain)
    if kind == "text":
        style = Style(running=True) if running else Style(form="text")
    draft.default(f"{one}path", source, here, when=source)
    draft.default("data.loss", loss, OWN)
    draft.default(f"{one}style", style, here)
    return EVERY | _own(kind, block, plain=plain, running=running)


def _own(kind: str, block: Mapping[str, Any], *, plain: bool, running: bool) -> dict[str, Any]:
    """Return the rules for the keys that only one kind of builder has."""
    if kind == "alpaca":
        turn = rule("never torchtune puts Alpaca's prompt into a turn of the chat template "
                    "-- data.template: true takes only the chat template, false only Alpaca's "
                    "prompt")  # fmt: skip
        return {"column_map": _columns(ALPACA), **({} if plain else {COMPONENT: turn})}
    if kind == "instruct":
        differ = rule("never its rows have `input` and `output`, and data.chat reads `prompt` and "
                      f"`completion` -- {_RENAME}")  # fmt: skip
        own = {} if block.get("column_map") else {COMPONENT: differ}
        return {"column_map": _columns(PAIRS), **own}
    if kind == "chat":
        column = COLUMNS.get(str(block.get("conversation_style")), "messages")
        style = rule(".form sharegpt, openai=messages !!")
        return {"conversation_style": style, "conversation_column": _column(column)}
    if kind == "text":
        whole = {"column": _column("text"), "add_eos": rule("always true")}
        return RUNNING | ({} if running else whole)
    return {}


_RENAME = "rename the columns in the data"


def _column(name: str) -> Rule:
    refused = f"never data.chat reads the column {name!r} !! {_RENAME}"
    return rule(f"if {name} then ignored data.chat reads this column else {refused}")


def _columns(names: Mapping[str, str]) -> Rule:
    refused = rule(f"never data.chat reads {', '.join(names.values())} !! {_RENAME}")
    same = rule("ignored data.chat reads these columns")
    return lambda value: (
        same if {**names, **(value if isinstance(value, Mapping) else {})} == names else refused
    )(value)


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
DEPTH = 10
"""Most references that follow one another."""
OUTSIDE = "refused refers to something outside the file -- write the value itself"


def _resolved(content: Mapping[str, Any], draft: Draft, file: str) -> dict[str, Any]:
    """Return the content with the values that OmegaConf's references (`${output_dir}/logs`) name.
    Keys with references to something outside the file are entered as refused, and left out."""

    def block(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found = {key: each(value, f"{prefix}{key}") for key, value in values.items()}
        for key in [key for key, new in found.items() if isinstance(new, str) and "${" in new]:
            del found[key]
            draft.enter(file, f"{prefix}{key}", values[key], outcome(OUTSIDE))
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
