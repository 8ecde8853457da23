"""Translate configurations in memory or from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.importing.files import read_config
from pipeline.importing.translator import ConfigFile, KeyOutcome, Request, Translation
from stages.importing.translator import HuggingFace


def from_files(folder: Path, *names: str, **request: Any) -> Translation:
    """Translate the named files together."""
    files = [read_config(folder / name) for name in names]
    return HuggingFace().translate(files, Request(**request))


def translated(*contents: Mapping[str, Any], **request: Any) -> Translation:
    """Translate files of these contents: `0.json`, `1.json`, ..."""
    files = [
        ConfigFile(path=Path(f"{number}.json"), content=content)
        for number, content in enumerate(contents)
    ]
    return HuggingFace().translate(files, Request(**request))


def slot(translation: Translation, name: str) -> dict[str, Any]:
    """Return a slot's fields."""
    assert translation.recipe is not None
    return {**translation.recipe["stages"][name]}


def outcome(translation: Translation, key: str) -> KeyOutcome:
    """Return the outcome of the one key of that name."""
    (found,) = [each for each in translation.outcomes if each.key == key]
    return found


def left_out(translation: Translation) -> dict[str, str]:
    """Return the reason for each key that the recipe lacks; empty for keys not translated."""
    return {each.key: each.why for each in translation.outcomes if each.left_out}
