"""The data slot: of a script of transformers or TRL, which has one file or data set of the hub, and
of tools that name any number of data sets, each with a form of its own.

The facts of data set n begin with `rows.n.`, those of one to evaluate on with `held.n.`:

    path      folder, file, data set of the hub, or the name of a loader such as `json`
    files     files next to it
    config, split, revision, weight
    style     a Style
    form      form of rows, where it is no part of the style
    text_key  key of running text
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import DataError, StageError
from pipeline.utils import COMMIT
from stages.importing import rules
from stages.importing.draft import NO_EFFECT, Draft

NO_COMMIT = "the commit of the day when it starts; `pipe pin` writes it"
READ = (".txt", ".jsonl", ".json", ".parquet")
"""Endings of the files that a recipe reads."""
LOADERS = ("json", "text", "parquet", "csv", "arrow")
"""Loaders of the library `datasets`, which take files."""
TRAIN, HELD = "rows.", "held."
_PLACE = ("path", "files", "config", "split", "revision", "weight")
REPLACED, FILLED = "ignored --data replaces it", "ignored data.text fills every sample"
AS_A_WHOLE, SEPARATE = "files are read as a whole", "put those rows in a separate file"


class Style(NamedTuple):
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


def _local_files(name: str) -> list[str]:
    """Return the path of a file, or patterns of the files of a folder that a recipe reads."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return [rules.path(name)]
    kinds = [kind for kind in READ if any(folder.glob(f"*{kind}"))]
    return [f"{rules.path(name)}/*{kind}" for kind in kinds or [""]]


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


def _put_files(draft: Draft, files: list[str], *facts: str) -> bool:
    """Add the slot `data` for local files, if there are any, by what the first row has."""
    if files:
        draft.slot("data", "data.chat" if _has_fields(files[0]) else "data.text")
        draft.put("data.files", files, *facts)
    return bool(files)


def has_heldout(draft: Draft) -> bool:
    """Return whether the recipe has data sets to evaluate on."""
    return bool(draft.slots["data"].keys() & {"heldout_files", "heldout_sources"})


def several(draft: Draft) -> None:
    """Fill the slot `data` of a tool that names data sets."""
    if _put_files(draft, [rules.path(each) for each in draft.request.data]):
        draft.drop(REPLACED, *draft.facts(TRAIN), *draft.facts(HELD))
    else:
        _slot(draft)
    text = draft.slots["data"]["use"] == "data.text"
    draft.drop(FILLED, "data.packing", when=text)
    every = "ignored data.text trains on every token"
    draft.drop(every, "data.loss", "data.too_long", when=text)
    draft.drop(NO_EFFECT, "data.documents_apart", when=not text)


def _slot(draft: Draft) -> None:
    numbers = _numbers(draft, TRAIN)
    numbers += [one for one in _numbers(draft, HELD) if draft.known(f"{one}style")]
    styles = {one: draft.value(f"{one}style", Style()) for one in numbers}
    facts = [f"{one}style" for one in numbers]
    running = {style.running for style in styles.values()}
    mixed = "refused running text and rows are not one training !! import one of them"
    draft.drop(mixed, *facts, when=len(running) == 2)
    draft.slot("data", "data.text" if True in running else "data.chat", *facts)
    if False in running:
        _forms(draft, styles)
    elif running:
        keys = [f"{one}text_key" for one in numbers]
        names = {draft.value(fact, "text") for fact in keys}
        if len(names) == 1:
            draft.put("data.text_key", names.pop(), *keys)
        draft.drop("refused the text has one key in all files !! rename the column", *keys,
                   when=len(names) > 1)  # fmt: skip
    if not _put(draft, TRAIN, "files", "sources"):
        draft.lacks("data.files", "files, or `sources` with data sets of the hub")
    _put(draft, HELD, "heldout_files", "heldout_sources")
    there = "ignored there is data to evaluate on"
    draft.drop(there, "data.heldout_fraction", when=has_heldout(draft))


def _numbers(draft: Draft, kind: str) -> list[str]:
    """Return the beginnings of the facts of each data set, in their order."""
    found = {int(fact.split(".")[1]) for fact in draft.facts(kind)}
    return [f"{kind}{number}." for number in sorted(found)]


def _forms(draft: Draft, styles: Mapping[str, Style]) -> None:
    """Set what applies to the rows of all data sets."""
    forms = {one: style.form or draft.value(f"{one}form") for one, style in styles.items()}
    if len({*forms.values()}) == 1 and None not in forms.values():
        facts = [f"{one}{'style' if style.form else 'form'}" for one, style in styles.items()]
        draft.put("data.form", next(iter(forms.values())), *facts)
    pairs = [one for one, form in forms.items() if form in ("alpaca", "prompt/completion")]
    plain = [f"{one}style" for one in pairs if not styles[one].template]
    if len(plain) == len(pairs) > 0:
        draft.put("data.template", False, *plain)
    else:
        why = "refused other rows take the chat template, and a recipe does one or the other"
        draft.drop(f"{why} !! convert one of them to `messages`", *plain)


def _put(draft: Draft, kind: str, files: str, sources: str) -> bool:
    """Put all data sets of a kind. Returns whether there are any."""
    found = {one: place for one in _numbers(draft, kind) if (place := _place(draft, one))}
    facts, places = [f"{one}{fact}" for one in found for fact in _PLACE], [*found.values()]
    if places and all(place.keys() == {"files"} for place in places):
        draft.put(f"data.{files}", [name for place in places for name in place["files"]], *facts)
    elif places:
        floats = any("dataset" in one and not COMMIT.fullmatch(one.get("revision", ""))
                     for one in places)  # fmt: skip
        if kind == TRAIN and len(places) > 1 and not any("weight" in one for one in places):
            places = [{**place, "weight": None} for place in places]
            what = "of each source the number of its rows, so that an epoch holds each row once"
            draft.lacks("data.sources.weight", what)
        draft.put(f"data.{sources}", places, *facts, note=NO_COMMIT if floats else "")
    return bool(places)


def _place(draft: Draft, one: str) -> dict[str, Any] | None:
    """Return the fields of a source; None if a recipe does not read it."""
    path, given = f"{one}path", f"{one}files"
    name, files = draft.value(path, ""), draft.value(given)
    if not name and not files:
        return None
    if {Path(each).suffix for each in files or [name]} & {".csv", ".arrow", ".tsv"}:
        draft.drop("refused no recipe reads such files -- convert them to JSON lines", path, given)
        return None
    if "://" in name:
        why = "refused is an address, and the files are local"
        draft.drop(f"{why} -- copy them to a disk, or use data.stream", path)
        return None
    known = [each for each in _PLACE[2:] if draft.known(f"{one}{each}")]
    fields = {each: draft.value(f"{one}{each}") for each in known}
    if not fields.get("revision"):
        fields.pop("revision", None)
    listed = bool(files) and (name in LOADERS or is_local(name) or not name)
    if listed or is_local(name) or name.endswith(READ):
        part = draft.value(f"{one}split", "train") != "train"
        draft.drop(f"refused {AS_A_WHOLE} !! {SEPARATE}", f"{one}split", when=part)
        local = [rules.path(each) for each in files] if listed else _local_files(name)
        return {"files": local, **{each: fields[each] for each in fields if each == "weight"}}
    why = "refused a data set of the hub is read by its configuration and split"
    draft.drop(f"{why} !! download the files, and name them", given)
    return {"dataset": name, **fields}


def script_data(draft: Draft) -> None:
    """Fill the slot `data` of a script."""
    if _put_files(draft, [rules.path(each) for each in draft.request.data]):
        draft.drop(REPLACED, "data", "dataset")
    elif draft.given("data"):
        _put_files(draft, [draft.value("data")], "data")
    elif not draft.given("dataset"):
        draft.slot("data", "data.text")
        draft.lacks("data.files", "text files, or use: data.chat for conversations")
    elif is_local(draft.value("dataset")):
        _put_files(draft, _local_files(draft.value("dataset")), "dataset")
        draft.drop(f"refused {AS_A_WHOLE} -- {SEPARATE}", "dataset.config", "dataset.heldout")
        draft.drop(NO_EFFECT, "dataset.split")
    else:
        # A script of transformers for plain text has blocks, a script of TRL has rows.
        blocks = any(entry.key == "block_size" for entry in draft.of("data.sequence_length"))
        draft.slot("data", "data.text" if blocks else "data.chat")
        names = {"dataset": "dataset", "config": "dataset.config"}
        source = {name: draft.value(fact) for name, fact in names.items() if draft.known(fact)}
        splits = {"sources": ("dataset.split", "train"),
                  "heldout_sources": ("dataset.heldout", None)}  # fmt: skip
        for key, (fact, default) in splits.items():
            if (split := draft.value(fact, default)) is not None:
                one = {**source, "split": split}
                draft.put(f"data.{key}", [one], *names.values(), fact, note=NO_COMMIT)
    _loss(draft)
    there = "ignored there are files to evaluate on"
    draft.drop(there, "data.heldout_fraction", when=draft.given("data.heldout_files"))


LOSS = ("loss.completion", "loss.assistant")


def _loss(draft: Draft) -> None:
    """Set `loss` of data.chat where it follows from TRL 1.16's completion_only_loss and
    assistant_only_loss alone. In a conversation, `completion` is the assistant's words."""
    completion, assistant = map(draft.value, LOSS)
    if draft.slots["data"]["use"] == "data.text":
        draft.drop(FILLED, "data.packing")
        masks = [fact for fact in LOSS if draft.value(fact)]
        draft.drop("refused data.text trains on every token -- use data.chat", *masks)
    elif assistant:
        draft.put("data.loss", "assistant" if completion is False else "completion", *LOSS)
    elif completion is False:
        draft.put("data.loss", "all", *LOSS)
    else:
        draft.lacks("data.loss", "TRL's is `all` for conversations, `completion` for prompts")
        why = "TRL then trains on whole conversations, but of prompts only on the completions"
        draft.drop(f"refused {why} -- set data.loss: all or completion", *LOSS)
