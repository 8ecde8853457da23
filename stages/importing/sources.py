"""The data slot: of a script of transformers or TRL, which has one file or data set of the hub, and
of tools that name any number of data sets, each with its form.

The facts of training set n are named `rows.n.*`, of evaluation set n `held.n.*`: `path` (folder,
file, data set of the hub, or a loader such as `json`), `files` next to it, `config`, `split`,
`revision`, `weight`, `style` (a form, RUNNING, or empty where `form` says it), `template` (whether
pairs of texts take the chat template) and `text_key` of running text.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import re
from pathlib import Path
from typing import Any

from pipeline import DataError, StageError
from pipeline.utils import COMMIT, expanded
from stages.importing.draft import Draft
from stages.importing.rules import path, why

NO_COMMIT = "the commit of the day when it starts; `pipe pin` writes it"
READ = (".txt", ".jsonl", ".json", ".parquet")
"""Endings of the files that a recipe reads."""
LOADERS = ("json", "text", "parquet", "csv", "arrow")
"""Loaders of the library `datasets`, which take files."""
TRAIN, HELD, RUNNING = "rows.", "held.", "running"
HELDOUT = ("heldout_files", "heldout_sources")
LOSS = ("loss.completion", "loss.assistant")
PLACE = ("path", "files", "config", "split", "revision", "weight")


def is_local(name: str) -> bool:
    """Return whether a name is a path, not the id of something on the hub."""
    return bool(re.match(r"[/~]|\.\.?/", name)) or Path(name).exists()


def _local_files(name: str) -> list[str]:
    """Return the path of a file, or patterns of the files of a folder that a recipe reads."""
    folder = expanded(name)
    if not folder.is_dir():
        return [path(name)]
    kinds = [kind for kind in READ if any(folder.glob(f"*{kind}"))]
    return [f"{path(name)}/*{kind}" for kind in kinds or [""]]


def _put_files(draft: Draft, files: list[str], *facts: str) -> bool:
    """Add the slot `data` for local files, if any: data.chat if the first row has its fields."""
    from stages.data.forms import KEYS
    from stages.data.rows import TEXT, rows

    chat = False
    # `pipe check` and the run report what is wrong with the file
    with contextlib.suppress(DataError, StageError, OSError):
        names = [one for one in files[:1] if not one.endswith(TEXT)]
        found = sorted(path for name in names for path in glob.glob(name, recursive=True))  # noqa: PTH207
        for row in itertools.islice(rows(Path(found[0])), 1) if found else ():
            chat = any(one != "text" and row.value.keys() >= {*keys} for one, keys in KEYS.items())
    if files:
        draft.put("data.use", "data.chat" if chat else "data.text")
        draft.put("data.files", files, *facts)
    return bool(files)


def script_data(draft: Draft) -> None:
    """Fill the slot `data` of a script, with `loss` of data.chat where it follows from TRL 1.16's
    completion_only_loss and assistant_only_loss only: of a conversation, the assistant's words."""
    name, (completion, assistant) = draft.value("dataset"), map(draft.value, LOSS)
    if _put_files(draft, [path(each) for each in draft.request.data]):
        draft.drop(why("replaced", "--data"), "data", "dataset")
    elif draft.given("data"):
        _put_files(draft, [draft.value("data")], "data")
    elif not draft.given("dataset"):
        draft.put("data.use", "data.text")
        draft.lacks("data.files", "text.files")
    elif is_local(name):
        _put_files(draft, _local_files(name), "dataset")
        draft.drop(why("whole_files"), "dataset.config", "dataset.heldout")
        draft.drop(why("idle"), "dataset.split")
    else:
        # A script of transformers for plain text has blocks, a script of TRL has rows.
        blocks = any(entry.key == "block_size" for entry in draft.of("data.sequence_length"))
        draft.put("data.use", "data.text" if blocks else "data.chat")
        config = {"config": draft.value("dataset.config")} if draft.known("dataset.config") else {}
        split, held = draft.value("dataset.split", "train"), draft.value("dataset.heldout")
        for key, fact, part in (("sources", "split", split), ("heldout_sources", "heldout", held)):
            if part is not None:
                facts = ("dataset", "dataset.config", f"dataset.{fact}")
                source = {"dataset": name, **config, "split": part}
                draft.put(f"data.{key}", [source], *facts, note=NO_COMMIT)
    if draft.slots["data"]["use"] == "data.text":
        draft.drop(why("full_samples"), "data.packing")
        draft.drop(why("no_masks"), *filter(draft.value, LOSS))
    elif assistant or completion is False:
        alone = "assistant" if assistant else "all"
        draft.put("data.loss", alone if completion is False else "completion", *LOSS)
    else:
        draft.lacks("data.loss")
        draft.drop(why("trl_loss"), *LOSS)
    files = draft.given("data.heldout_files")
    draft.drop(why("there_are_files"), "data.heldout_fraction", when=files)


def several(draft: Draft) -> None:
    """Fill the slot `data` of a tool that names data sets."""
    if _put_files(draft, [path(each) for each in draft.request.data]):
        draft.drop(why("replaced", "--data"), *draft.facts(TRAIN), *draft.facts(HELD))
    else:
        sets = _sets(draft, TRAIN)
        sets += [one for one in _sets(draft, HELD) if draft.known(f"{one}style")]
        styles = {one: draft.value(f"{one}style") for one in sets}
        facts, keys = [f"{one}style" for one in sets], [f"{one}text_key" for one in sets]
        running = {style == RUNNING for style in styles.values()}
        draft.drop(why("mixed_rows"), *facts, when=len(running) == 2)
        draft.put("data.use", "data.text" if True in running else "data.chat", *facts)
        if False in running:
            forms = {
                one: draft.value(f"{one}form") if style in (None, "", RUNNING) else style
                for one, style in styles.items()
            }
            if len({*forms.values()}) == 1 and None not in forms.values():
                own = [f"{one}{'style' if style else 'form'}" for one, style in styles.items()]
                draft.put("data.form", next(iter(forms.values())), *own)
            pairs = [one for one, form in forms.items() if form in ("alpaca", "prompt/completion")]
            plain = [f"{one}style" for one in pairs
                     if styles[one] and not draft.value(f"{one}template", True)]  # fmt: skip
            if len(plain) == len(pairs) > 0:
                draft.put("data.template", False, *plain)
            else:
                draft.drop(why("mixed_templates"), *plain)
        elif running:
            names = {draft.value(fact, "text") for fact in keys}
            draft.drop(why("mixed_keys"), *keys, when=len(names) > 1)
            if len(names) == 1:
                draft.put("data.text_key", names.pop(), *keys)
        if not _put_places(draft, TRAIN, "files", "sources"):
            draft.lacks("data.files")
        there = _put_places(draft, HELD, *HELDOUT)
        draft.drop(why("there_is_data"), "data.heldout_fraction", when=there)
    text = draft.slots["data"]["use"] == "data.text"
    draft.drop(why("full_samples"), "data.packing", when=text)
    draft.drop(why("every_token"), "data.loss", "data.too_long", when=text)
    draft.drop(why("idle"), "data.documents_apart", when=not text)


def _sets(draft: Draft, kind: str) -> list[str]:
    """Return the beginnings of the facts of each data set, in their order."""
    numbers = {int(fact.split(".")[1]) for fact in draft.facts(kind)}
    return [f"{kind}{number}." for number in sorted(numbers)]


def _put_places(draft: Draft, kind: str, files: str, sources: str) -> bool:
    """Put all data sets of a kind. Returns whether there are any."""
    found = {one: place for one in _sets(draft, kind) if (place := _place(draft, one))}
    facts, places = [f"{one}{fact}" for one in found for fact in PLACE], [*found.values()]
    if places and all(place.keys() == {"files"} for place in places):
        draft.put(f"data.{files}", [name for place in places for name in place["files"]], *facts)
    elif places:
        floats = any("dataset" in place and not COMMIT.fullmatch(place.get("revision", ""))
                     for place in places)  # fmt: skip
        if kind == TRAIN and len(places) > 1 and not any("weight" in place for place in places):
            places = [{**place, "weight": None} for place in places]
            draft.lacks("data.sources.weight")
        draft.put(f"data.{sources}", places, *facts, note=NO_COMMIT if floats else "")
    return bool(places)


def _place(draft: Draft, one: str) -> dict[str, Any] | None:
    """Return the fields of a source; None if a recipe does not read it."""
    name, files = draft.value(f"{one}path", ""), draft.value(f"{one}files")
    if {Path(each).suffix for each in files or [name]} & {".csv", ".arrow", ".tsv"}:
        draft.drop(why("unread_format"), f"{one}path", f"{one}files")
        return None
    if "://" in name:
        draft.drop(why("address"), f"{one}path")
    if "://" in name or not (name or files):
        return None
    known = [each for each in PLACE[2:] if draft.known(f"{one}{each}")]
    fields = {each: draft.value(f"{one}{each}") for each in known}
    listed = bool(files) and (name in LOADERS or is_local(name) or not name)
    if listed or is_local(name) or name.endswith(READ):
        part = draft.value(f"{one}split", "train") != "train"
        draft.drop(why("split_of_file"), f"{one}split", when=part)
        local = [path(each) for each in files] if listed else _local_files(name)
        return {"files": local, **{each: fields[each] for each in fields if each == "weight"}}
    draft.drop(why("files_of_hub"), f"{one}files")
    kept = {each: value for each, value in fields.items() if value or each != "revision"}
    return {"dataset": name, **kept}
