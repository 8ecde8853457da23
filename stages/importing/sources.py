"""The data slot of tools that name any number of data sets, each with a form of its own.

The facts of data set n begin with `rows.n.`, those of one to evaluate on with `held.n.`:

    path      folder, file, data set of the hub, or the name of a loader such as `json`
    files     files beside it
    config, split, revision, weight
    style     a Style
    form      form of rows, where it is no part of the style
    text_key  key of running text
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import DataError, StageError
from pipeline.importing import Request
from pipeline.utils import COMMIT
from stages.importing import rules
from stages.importing.report import Draft, Report

NO_COMMIT = "the commit of the day when it starts; `pipe pin` writes it"
READ = (".txt", ".jsonl", ".json", ".parquet")
"""Endings of the files that a recipe reads."""
LOADERS = ("json", "text", "parquet", "csv", "arrow")
"""Loaders of the library `datasets`, which take files."""
TRAIN, HELD = "rows.", "held."
_PLACE = ("path", "files", "config", "split", "revision", "weight")


@dataclass(frozen=True, kw_only=True)
class Style:
    """How rows become samples."""

    form: str | None = None
    """Form of data.chat; None if another key says it."""
    running: bool = False
    """Whether the rows are running text."""
    template: bool = True
    """Whether a pair of texts takes the chat template."""


def is_local(name: str) -> bool:
    """Return whether a name is a path, not the id of something on the hub."""
    return bool(re.match(r"[/~]|\.\.?/", name)) or Path(name).exists()


def local_files(name: str) -> list[str]:
    """Return the path of a file, or patterns of the files of a folder that a recipe reads."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return [rules.path(name)]
    kinds = [kind for kind in READ if any(folder.glob(f"*{kind}"))]
    return [f"{rules.path(name)}/*{kind}" for kind in kinds or [""]]


def requested(draft: Draft, request: Request) -> bool:
    """Fill the slot with the files of `--data`, if there are any."""
    files = [str(Path(each).expanduser().absolute()) for each in request.data]
    if files:
        put_files(draft, files)
    return bool(files)


def put_files(draft: Draft, files: list[str], *facts: str) -> None:
    """Add the slot `data` for local files, by what the first row of the first one has."""
    draft.slot("data", "data.chat" if _has_fields(files[0]) else "data.text")
    draft.put("data.files", files, *facts)


def several(draft: Draft, request: Request) -> None:
    """Fill the slot `data`."""
    report = draft.report
    if requested(draft, request):
        report.ignore(*report.facts(TRAIN), *report.facts(HELD), why="--data replaces it")
    else:
        _slot(draft)
    if draft.slots["data"]["use"] == "data.text":
        report.ignore("data.packing", why="data.text fills every sample")
        report.ignore("data.loss", "data.too_long", why="data.text trains on every token")
    else:
        report.ignore("data.documents_apart")


def _slot(draft: Draft) -> None:
    report = draft.report
    numbers = _numbers(report, TRAIN)
    numbers += [one for one in _numbers(report, HELD) if report.known(f"{one}style")]
    styles = {one: report.value(f"{one}style", Style()) for one in numbers}
    facts = [f"{one}style" for one in numbers]
    running = {style.running for style in styles.values()}
    if len(running) == 2:
        why, hint = "running text and rows are not one training", "import one of them"
        report.refuse(*facts, why=why, hint=hint, blocks=True)
    draft.slot("data", "data.text" if True in running else "data.chat", *facts)
    if False in running:
        _forms(draft, styles)
    elif running:
        _text_key(draft, numbers)
    if _put(draft, TRAIN, "files", "sources") == 0:
        draft.lacks("data.files", "files, or `sources` with data sets of the hub")
    _put(draft, HELD, "heldout_files", "heldout_sources")
    if has_heldout(draft):
        report.ignore("data.heldout_fraction", why="there is data to evaluate on")


def has_heldout(draft: Draft) -> bool:
    """Return whether the recipe has data sets to evaluate on."""
    return bool(draft.slots["data"].keys() & {"heldout_files", "heldout_sources"})


def _numbers(report: Report, kind: str) -> list[str]:
    """Return the beginnings of the facts of each data set, in their order."""
    found = {int(fact.split(".")[1]) for fact in report.facts(kind)}
    return [f"{kind}{number}." for number in sorted(found)]


def _forms(draft: Draft, styles: Mapping[str, Style]) -> None:
    """Set what applies to the rows of all data sets."""
    report = draft.report
    forms = {one: style.form or report.value(f"{one}form") for one, style in styles.items()}
    if len({*forms.values()}) == 1 and None not in forms.values():
        facts = [f"{one}{'style' if style.form else 'form'}" for one, style in styles.items()]
        draft.put("data.form", next(iter(forms.values())), *facts)
    pairs = [one for one, form in forms.items() if form in ("alpaca", "prompt/completion")]
    plain = [f"{one}style" for one in pairs if not styles[one].template]
    if len(plain) == len(pairs) > 0:
        draft.put("data.template", False, *plain)
    elif plain:
        why = "other rows take the chat template, and a recipe does one or the other"
        report.refuse(*plain, why=why, hint="convert one of them to `messages`", blocks=True)


def _text_key(draft: Draft, numbers: list[str]) -> None:
    report = draft.report
    facts = [f"{one}text_key" for one in numbers]
    keys = {report.value(fact, "text") for fact in facts}
    if len(keys) == 1:
        draft.put("data.text_key", keys.pop(), *facts)
    elif keys:
        why = "the text has one key in all files"
        report.refuse(*facts, why=why, hint="rename the column", blocks=True)


def _put(draft: Draft, kind: str, files: str, sources: str) -> int:
    """Put all data sets of a kind, and return their number."""
    report = draft.report
    found = {one: place for one in _numbers(report, kind) if (place := _place(report, one))}
    facts = [f"{one}{fact}" for one in found for fact in _PLACE]
    if not found:
        return 0
    if all(place.keys() == {"files"} for place in found.values()):
        every = [name for place in found.values() for name in place["files"]]
        draft.put(f"data.{files}", every, *facts)
        return len(found)
    floats = any(
        "dataset" in place and not COMMIT.fullmatch(place.get("revision", ""))
        for place in found.values()
    )
    if kind == TRAIN and len(found) > 1 and not any("weight" in each for each in found.values()):
        for place in found.values():
            place["weight"] = None
        what = "of each source the number of its rows, so that an epoch holds each row once"
        draft.lacks("data.sources.weight", what)
    draft.put(f"data.{sources}", [*found.values()], *facts, note=NO_COMMIT if floats else "")
    return len(found)


def _place(report: Report, one: str) -> dict[str, Any] | None:
    """Return the fields of a source; None if a recipe does not read it."""
    name, beside = report.value(f"{one}path", ""), report.value(f"{one}files")
    if not name and not beside:
        return None
    suffixes = {Path(each).suffix for each in beside or [name]} & {".csv", ".arrow", ".tsv"}
    if suffixes:
        why, hint = "no recipe reads such files", "convert them to JSON lines"
        report.refuse(*(f"{one}{fact}" for fact in ("path", "files")), why=why, hint=hint)
        return None
    if "://" in name:
        hint = "copy them to a disk, or use data.stream"
        report.refuse(f"{one}path", why="is an address, and the files are local", hint=hint)
        return None
    weight = report.value(f"{one}weight")
    more = {} if weight is None else {"weight": weight}
    if beside and (name in LOADERS or is_local(name) or not name):
        return _local(report, one, [rules.path(each) for each in beside], more)
    if is_local(name) or name.endswith(READ):
        return _local(report, one, local_files(name), more)
    return _hub(report, one, name, more)


def _local(report: Report, one: str, files: list[str], more: dict[str, Any]) -> dict[str, Any]:
    if report.value(f"{one}split", "train") != "train":
        hint = "put those rows in a separate file"
        report.refuse(f"{one}split", why="files are read as a whole", hint=hint, blocks=True)
    return {"files": files, **more}


def _hub(report: Report, one: str, name: str, more: dict[str, Any]) -> dict[str, Any]:
    why = "a data set of the hub is read by its configuration and split"
    report.refuse(f"{one}files", why=why, hint="download the files, and name them", blocks=True)
    source: dict[str, Any] = {"dataset": name}
    for fact in ("config", "split"):
        if report.known(f"{one}{fact}"):
            source[fact] = report.value(f"{one}{fact}")
    revision = report.value(f"{one}revision", "")
    if revision:
        source["revision"] = revision
    return {**source, **more}


def _has_fields(file: str) -> bool:
    """Return whether the first row of a file, or of a pattern's first file, has fields for
    data.chat, and not only text."""
    from stages.data.forms import KEYS
    from stages.data.rows import TEXT, rows

    if file.endswith(TEXT):
        return False
    try:
        files = sorted(glob.glob(file, recursive=True))  # noqa: PTH207 (absolute patterns)
        first = next(rows(Path(files[0])), None) if files else None
    except (DataError, StageError, OSError):
        return False  # `pipe check` and the run report what is wrong with the file
    keys = first.value.keys() if first is not None else set()
    return any(name != "text" and keys >= set(needed) for name, needed in KEYS.items())


def script_data(draft: Draft, request: Request) -> None:
    """Fill the slot `data`."""
    report = draft.report
    if requested(draft, request):
        report.ignore("data", "dataset", why="--data replaces it")
    elif report.given("data"):
        put_files(draft, [report.value("data")], "data")
    elif report.given("dataset"):
        # A script of transformers for plain text has blocks, a script of TRL has rows.
        blocks = any(entry.key == "block_size" for entry in report.of("data.sequence_length"))
        name = report.value("dataset")
        if is_local(name):
            put_files(draft, local_files(name), "dataset")
            why, hint = "files are read as a whole", "put those rows in a separate file"
            report.refuse("dataset.config", "dataset.heldout", why=why, hint=hint)
            report.ignore("dataset.split")
        else:
            draft.slot("data", "data.text" if blocks else "data.chat")
            _hub_sources(draft)
    else:
        draft.slot("data", "data.text")
        draft.lacks("data.files", "text files, or use: data.chat for conversations")
    _loss(draft)
    if report.given("data.heldout_files"):
        report.ignore("data.heldout_fraction", why="there are files to evaluate on")


def _hub_sources(draft: Draft) -> None:
    report = draft.report
    names = {"dataset": "dataset", "config": "dataset.config"}
    source = {name: report.value(fact) for name, fact in names.items() if report.known(fact)}
    splits = {"sources": ("dataset.split", "train"), "heldout_sources": ("dataset.heldout", None)}
    for key, (fact, default) in splits.items():
        split = report.value(fact, default)
        if split is not None:
            one = {**source, "split": split}
            draft.put(f"data.{key}", [one], *names.values(), fact, note=NO_COMMIT)


LOSS = ("loss.completion", "loss.assistant")


def _loss(draft: Draft) -> None:
    """Set `loss` of data.chat where it follows from TRL 1.16's completion_only_loss and
    assistant_only_loss alone. In a conversation, `completion` is the assistant's words."""
    report = draft.report
    completion, assistant = map(report.value, LOSS)
    if draft.slots["data"]["use"] == "data.text":
        report.ignore("data.packing", why="data.text fills every sample")
        masks = [fact for fact in LOSS if report.value(fact)]
        report.refuse(*masks, why="data.text trains on every token", hint="use data.chat")
    elif assistant:
        draft.put("data.loss", "assistant" if completion is False else "completion", *LOSS)
    elif completion is False:
        draft.put("data.loss", "all", *LOSS)
    else:
        draft.lacks("data.loss", "TRL's is `all` for conversations, `completion` for prompts")
        why = "TRL then trains on whole conversations, but of prompts only on the completions"
        report.refuse(*LOSS, why=why, hint="set data.loss: all or completion")
