"""Data sets of torchtune: the builders that `dataset` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stages.importing import rules
from stages.importing.report import Report
from stages.importing.rules import Table, allowed, refused, sets, truth
from stages.importing.sources import Style
from stages.importing.tools import COMPONENT
from stages.importing.torchtune.keys import PLAIN, family, strict
from stages.importing.trainer import template_setting

PACKAGE = "torchtune.datasets."
_RENAME = "rename the columns in the data"
FORMS = {"sharegpt": "sharegpt", "openai": "messages"}
COLUMNS = {"sharegpt": "conversations", "openai": "messages"}
"""Style of a conversation -> column of data.chat."""
PAIRS = {"input": "prompt", "output": "completion"}
"""Columns of instruct_dataset -> those of data.chat."""
ALPACA = {"instruction": "instruction", "input": "input", "output": "output"}


class Builder(NamedTuple):
    """A builder of data sets, and what it does unless told."""

    kind: str
    source: str = ""
    loss: str = "assistant"


BUILDERS = {
    "alpaca_dataset": Builder("alpaca", "tatsu-lab/alpaca", loss="all"),
    "alpaca_cleaned_dataset": Builder("alpaca", "yahma/alpaca-cleaned", loss="all"),
    "instruct_dataset": Builder("instruct"),
    "chat_dataset": Builder("chat"),
    "slimorca_dataset": Builder("slimorca", "Open-Orca/SlimOrca-Dedup"),
    "text_completion_dataset": Builder("text", loss="all"),
}


def _builder(block: Mapping[str, Any]) -> Builder | None:
    """Return the builder that a block names; None if it is not one of those known here."""
    return BUILDERS.get(str(block.get(COMPONENT, "")).removeprefix(PACKAGE))


def _plain(tokenizer: Any) -> bool:
    """Return whether a tokenizer puts nothing around messages."""
    block = tokenizer if isinstance(tokenizer, Mapping) else {}
    return family(block.get(COMPONENT)) in PLAIN and not block.get("prompt_template")


def take_template(sets: list[Any], tokenizer: Any) -> bool:
    """Return whether torchtune lays out rows of these data sets by the tokenizer's format."""
    made = [_builder(block) for block in sets if isinstance(block, Mapping)]
    kinds = {each.kind for each in made if each}
    return bool(kinds & {"chat", "slimorca"}) or ("instruct" in kinds and not _plain(tokenizer))


def read_set(
    report: Report, file: str, key: str, block: Mapping[str, Any], one: str, tokenizer: Any
) -> None:
    """Read a data set whose facts begin with `one`."""
    made = _builder(block)
    if made is None:
        hint = "use instruct_dataset, chat_dataset or text_completion_dataset, with a source"
        why = "data.chat and data.text do not read such rows"
        others = dict.fromkeys(block, rules.passes(f"follows {COMPONENT}"))
        report.read(file, block, {**others, COMPONENT: _refuse(why, hint)}, f"{key}.")
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
    own = _own(made.kind, block, one, plain=plain, running=running)
    report.read(file, block, strict(block, {**_shared(one), **own}), f"{key}.")


def _shared(one: str) -> Table:
    return rules.table({
        COMPONENT: rules.passes("its settings are in the slot data"),
        "source": sets(f"{one}path"), "data_files": sets(f"{one}files", rules.names),
        "split": sets(f"{one}split"), "name subset": sets(f"{one}config"),
        "revision": sets(f"{one}revision"), "packed": sets("data.packing", truth),
        "new_system_prompt": template_setting,
        "train_on_input": sets("data.loss", lambda value: "all" if truth(value) else "assistant"),
    })  # fmt: skip


def _own(kind: str, block: Mapping[str, Any], one: str, *, plain: bool, running: bool) -> Table:
    """Return the rules for the keys that only one kind of builder has."""
    if kind == "alpaca":
        why = "torchtune puts Alpaca's prompt into a turn of the chat template"
        hint = "data.template: true takes only the chat template, false only Alpaca's prompt"
        own = {} if plain else {COMPONENT: _refuse(why, hint, blocks=False)}
        return {"column_map": _columns(ALPACA), **own}
    if kind == "instruct":
        why = "its rows have `input` and `output`, and data.chat reads `prompt` and `completion`"
        own = {} if block.get("column_map") else {COMPONENT: _refuse(why, _RENAME, blocks=False)}
        return {"column_map": _columns(PAIRS), **own}
    if kind == "chat":
        column = COLUMNS.get(str(block.get("conversation_style")), "messages")
        return {
            "conversation_style": sets(f"{one}form", rules.choice(FORMS, blocks=True)),
            "conversation_column": _column(column),
        }
    return {} if kind != "text" else {
        "column": sets(f"{one}text_key") if running else _column("text"),
        "add_eos": sets("data.append_eos", truth) if running else allowed(True),
        "split_across_pack": rules.passes("data.text cuts rows, data.chat does not"),
    }  # fmt: skip


def _refuse(why: str, hint: str, *, blocks: bool = True) -> rules.Rule:
    return lambda value: refused(why, hint, blocks=blocks)


def _column(name: str) -> rules.Rule:
    why, refusal = "data.chat reads this column", f"data.chat reads the column {name!r}"
    return rules.only(lambda value: value == name, why, refusal, _RENAME, blocks=True)


def _columns(names: Mapping[str, str]) -> rules.Rule:
    def same(value: Any) -> bool:
        return {**names, **(value if isinstance(value, Mapping) else {})} == names

    refusal = f"data.chat reads {', '.join(names.values())}"
    return rules.only(same, "data.chat reads these columns", refusal, _RENAME, blocks=True)
