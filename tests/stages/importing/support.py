"""Translate configurations in memory or from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.importing.files import read_config
from pipeline.importing.translator import ConfigFile, KeyOutcome, Request, Translation
from stages.importing.translator import HuggingFace


def from_files(folder: Path, *names: str, **request: Any) -> Translation:
    """What the named files become together."""
    files = [read_config(folder / name) for name in names]
    return HuggingFace().translate(files, Request(**request))


def translated(*contents: Mapping[str, Any], **request: Any) -> Translation:
    """What files of these contents become: `0.json`, `1.json`, ..."""
    files = [
        ConfigFile(path=Path(f"{number}.json"), content=content)
        for number, content in enumerate(contents)
    ]
    return HuggingFace().translate(files, Request(**request))


def slot(translation: Translation, name: str) -> dict[str, Any]:
    """A slot's fields."""
    assert translation.recipe is not None
    return {**translation.recipe["stages"][name]}


def fate(translation: Translation, key: str) -> KeyOutcome:
    """Of the one key of that name."""
    (found,) = [fate for fate in translation.fates if fate.key == key]
    return found


def refused(translation: Translation) -> dict[str, str]:
    """Refused key -> why."""
    return {fate.key: fate.why for fate in translation.fates if fate.outcome == "refused"}


def leaves(content: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Keys with a value that is no block, or an empty one."""
    found: list[str] = []
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            found += leaves(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}")
    return found
