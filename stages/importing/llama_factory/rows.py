"""Data sets of LLaMA-Factory: the entries of `dataset_info.json` that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.utils import did_you_mean
from stages.importing import rules
from stages.importing.report import Report
from stages.importing.rules import RuleResult, Table, allowed, refused, sets, unsupported
from stages.importing.sources import Style

INFO = "dataset_info.json"
ADDRESSES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys of which every entry has one."""
STYLES = {"alpaca": Style(form="alpaca"), "sharegpt": Style(), "openai": Style()}
_RENAME = "rename the column in the data"
_NAMES = "rename it in the data"
_elsewhere = unsupported("data comes from files and the hub of Hugging Face", "download it")
_whole = unsupported("files are read as a whole", "write those rows to a separate file")
_images = unsupported("recipes train on text only", blocks=True)
_preferences = unsupported("training on preferences is not supported by recipes", blocks=True)
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output",
           "history": "history", "system": "system", "tools": "tools"}  # fmt: skip
"""Columns that data.chat reads, under their names in an entry."""
FORMS = {"messages": "messages", "conversations": "sharegpt"}
TAGS = {
    "messages": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                 "assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool"},
    "sharegpt": {"role_tag": "from", "content_tag": "value", "user_tag": "human",
                 "assistant_tag": "gpt", "observation_tag": "observation",
                 "function_tag": "function_call", "system_tag": "system"},
}  # fmt: skip
"""Names of roles and contents, as OpenAI and as ShareGPT write them."""


OWN = "LLaMA-Factory's default"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a data set is in the recipe, and where its files are."""

    one: str
    """Beginning of its facts."""
    folder: str
    running: bool
    """Whether its text is trained on as it is."""


def is_info(content: Mapping[str, Any]) -> bool:
    """Return whether it is the content of a dataset_info.json."""
    entries = list(content.values())
    return bool(entries) and all(
        isinstance(entry, Mapping) and any(key in entry for key in ADDRESSES) for entry in entries
    )


def read_entry(
    report: Report, file: str, name: str, entry: Mapping[str, Any], place: Place
) -> None:
    """Read an entry as a data set."""
    one = place.one
    if place.running:
        report.default(f"{one}style", Style(running=True), "stage: pt")
        report.default(f"{one}text_key", "instruction", OWN)
    else:
        report.default(f"{one}style", STYLES["alpaca"], OWN)
        report.default(f"{one}form", "sharegpt", OWN)
    report.read(file, entry, _table(entry, place), f"{name}.")


def _table(entry: Mapping[str, Any], place: Place) -> Table:
    one, there = place.one, "hf_hub_url" in entry
    style = sets(f"{one}style", rules.choice(STYLES, "use alpaca or sharegpt", blocks=True))
    return {
        "file_name": sets(f"{one}path", lambda name: str(Path(place.folder, name).absolute())),
        "hf_hub_url": sets(f"{one}path", str),
        **dict.fromkeys(("ms_hub_url", "om_hub_url"), _mirror if there else _elsewhere),
        **dict.fromkeys(("script_url", "cloud_file_name"), _elsewhere),
        "formatting": rules.passes("stage: pt takes the text") if place.running else style,
        "subset": sets(f"{one}config", str),
        "split": sets(f"{one}split", str),
        **rules.table({"folder num_samples": _whole}),
        "ranking": _preferences,
        "columns": _columns(entry, place),
        "tags": {key: allowed(tag, hint=_NAMES, blocks=True) for key, tag in _tags(entry).items()},
    }


def _columns(entry: Mapping[str, Any], place: Place) -> Table:
    found: dict[str, rules.Rule] = {
        key: allowed(column, hint=_RENAME, blocks=True) for key, column in COLUMNS.items()
    }
    if place.running:
        found["prompt"] = sets(f"{place.one}text_key", str)
    forms = FORMS if _tags(entry) is TAGS["messages"] else {"conversations": "sharegpt"}
    found["messages"] = sets(f"{place.one}form", rules.choice(forms, _RENAME, blocks=True))
    found.update(rules.table({"images videos audios": _images}))
    found.update(rules.table({"chosen rejected kto_tag": _preferences}))
    return found


def _tags(entry: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the names of roles and contents that the rows should have."""
    given = entry.get("tags")
    role = given.get("role_tag") if isinstance(given, Mapping) else None
    return TAGS["messages" if role == "role" else "sharegpt"]


def _mirror(value: Any) -> RuleResult:
    return RuleResult(outcome="default", why="is also on the hub of Hugging Face")


def unknown(name: str, info: Mapping[str, Any]) -> RuleResult:
    """Return the refusal of a name that has no entry."""
    why = f"{INFO} has no entry {name!r}"
    return refused(why, did_you_mean(name, [*info]), blocks=True)
