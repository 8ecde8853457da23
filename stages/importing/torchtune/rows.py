"""Data sets of torchtune: the builders that `dataset` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.importing import rules
from stages.importing.report import Report
from stages.importing.rules import RuleResult, Table, allowed, refused, sets
from stages.importing.sources import Style
from stages.importing.tools import COMPONENT
from stages.importing.torchtune.keys import strict
from stages.importing.trainer import template_setting

PACKAGE = "torchtune.datasets."
_RENAME = "rename the columns in the data"
FORMS = {"sharegpt": "sharegpt", "openai": "messages"}
COLUMNS = {"sharegpt": "conversations", "openai": "messages"}
"""Style of a conversation -> column of data.chat."""
PAIRS = {"input": "prompt", "output": "completion"}
"""Columns of instruct_dataset -> those of data.chat."""
ALPACA = {"instruction": "instruction", "input": "input", "output": "output"}


@dataclass(frozen=True, kw_only=True)
class Builder:
    """A builder of data sets, and what it does unless told."""

    kind: str
    source: str | None = None
    train_on_input: bool = False


BUILDERS = {
    "alpaca_dataset": Builder(kind="alpaca", source="tatsu-lab/alpaca", train_on_input=True),
    "alpaca_cleaned_dataset": Builder(
        kind="alpaca", source="yahma/alpaca-cleaned", train_on_input=True
    ),
    "instruct_dataset": Builder(kind="instruct"),
    "chat_dataset": Builder(kind="chat"),
    "slimorca_dataset": Builder(kind="slimorca", source="Open-Orca/SlimOrca-Dedup"),
    "text_completion_dataset": Builder(kind="text", train_on_input=True),
}


def builder(block: Mapping[str, Any]) -> Builder | None:
    """Return the builder that a block names; None if it is not one of those known here."""
    return BUILDERS.get(str(block.get(COMPONENT, "")).removeprefix(PACKAGE))


def read_set(
    report: Report, file: str, key: str, block: Mapping[str, Any], one: str, *, plain: bool
) -> None:
    """Read a data set whose facts begin with `one`. `plain` means that the tokenizer puts nothing
    around messages."""
    made = builder(block)
    if made is None:
        hint = "use instruct_dataset, chat_dataset or text_completion_dataset, with a source"
        why = "data.chat and data.text do not read such rows"
        others = dict.fromkeys(block, rules.passes(f"follows {COMPONENT}"))
        unknown: Table = {**others, COMPONENT: lambda value: refused(why, hint, blocks=True)}
        report.read(file, block, unknown, f"{key}.")
        return
    if made.source:
        report.default(f"{one}path", made.source, f"{key}.{COMPONENT} in {file}")
    loss = "all" if made.train_on_input else "assistant"
    report.default("data.loss", loss, "torchtune's default")
    style = _style(block, made.kind, plain=plain)
    report.default(f"{one}style", style, f"{key}.{COMPONENT} in {file}")
    table = {**_shared(one), **_own(made.kind, block, one, plain=plain)}
    report.read(file, block, strict(block, table), f"{key}.")


def takes_template(block: Any, *, plain: bool) -> bool:
    """Return whether torchtune lays the rows out by the format of the model's tokenizer."""
    made = builder(block) if isinstance(block, Mapping) else None
    kind = made.kind if made else ""
    return kind in ("chat", "slimorca") or (kind == "instruct" and not plain)


def _style(block: Mapping[str, Any], kind: str, *, plain: bool) -> Style:
    if kind == "text":
        return Style(running=True) if _is_cut(block) else Style(form="text")
    forms = {"alpaca": "alpaca", "instruct": "prompt/completion", "slimorca": "sharegpt"}
    return Style(form=forms.get(kind), template=not plain)


def _is_cut(block: Mapping[str, Any]) -> bool:
    """Return whether text is cut where a sample is full."""
    return bool(block.get("packed") and block.get("split_across_pack", True))


def _shared(one: str) -> Table:
    return rules.table({
        COMPONENT: rules.passes("its settings are in the slot data"),
        "source": sets(f"{one}path", str),
        "data_files": sets(f"{one}files", rules.names),
        "split": sets(f"{one}split", str),
        "name subset": sets(f"{one}config"),
        "revision": sets(f"{one}revision", str),
        "packed": sets("data.packing", rules.truth),
        "new_system_prompt": template_setting,
        "train_on_input": sets(
            "data.loss", lambda value: "all" if rules.truth(value) else "assistant"
        ),
    })  # fmt: skip


def _own(kind: str, block: Mapping[str, Any], one: str, *, plain: bool) -> Table:
    """Return the rules for the keys that only one kind of builder has."""
    if kind == "alpaca":
        return {"column_map": _columns(ALPACA), **({} if plain else {COMPONENT: _alpaca})}
    if kind == "instruct":
        own = {} if block.get("column_map") else {COMPONENT: _pairs}
        return {"column_map": _columns(PAIRS), **own}
    if kind == "chat":
        column = COLUMNS.get(str(block.get("conversation_style")), "messages")
        return {
            "conversation_style": sets(f"{one}form", rules.choice(FORMS, blocks=True)),
            "conversation_column": _column(column),
        }
    if kind != "text":
        return {}
    running = _is_cut(block)
    return {
        "column": sets(f"{one}text_key", str) if running else _column("text"),
        "add_eos": sets("data.append_eos", rules.truth) if running else allowed(True),
        "split_across_pack": rules.passes("data.text cuts rows, data.chat does not"),
    }


def _column(name: str) -> rules.Rule:
    return lambda value: (
        RuleResult(outcome="default", why="data.chat reads this column")
        if value == name
        else refused(f"data.chat reads the column {name!r}", _RENAME, blocks=True)
    )


def _columns(names: Mapping[str, str]) -> rules.Rule:
    def rule(value: Any) -> RuleResult:
        given = value if isinstance(value, Mapping) else {}
        if value is None or {**names, **given} == names:
            return RuleResult(outcome="default", why="data.chat reads these columns")
        return refused(f"data.chat reads {', '.join(names.values())}", _RENAME, blocks=True)

    return rule


def _pairs(value: Any) -> RuleResult:
    why = "its rows have `input` and `output`, and data.chat reads `prompt` and `completion`"
    return refused(why, _RENAME)


def _alpaca(value: Any) -> RuleResult:
    why = "torchtune puts Alpaca's prompt into a turn of the chat template"
    hint = "data.template: true takes only the chat template, false only Alpaca's prompt"
    return refused(why, hint)
