"""Translate configurations in memory or from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.importing.translator import (
    ConfigFile,
    KeyOutcome,
    Request,
    Translation,
    Translator,
    read_config,
)
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


def imported(
    translator: Translator, recipe: Mapping[str, Any], *others: ConfigFile, **request: Any
) -> Translation:
    """Translate a recipe of another tool, `recipe.yaml`, with the files that belong to it."""
    name = request.pop("name", "recipe.yaml")
    files = [ConfigFile(path=Path(name), content=recipe), *others]
    assert translator.supports(files)
    return translator.translate(files, Request(**request))


def assert_fields(translation: Translation, name: str, fields: Mapping[str, Any]) -> None:
    """Assert that nothing is left out, and that a slot has these fields; None means none."""
    assert left_out(translation) == {}
    assert {key: slot(translation, name).get(key) for key in fields} == fields


def outcomes(translation: Translation) -> dict[str, str]:
    """Return key -> outcome, for keys that appear once."""
    found = {each.key: each.outcome for each in translation.outcomes}
    assert len(found) == len(translation.outcomes)
    return found


def by_outcome(translation: Translation) -> dict[str, set[str]]:
    """Return outcome -> keys."""
    found: dict[str, set[str]] = {}
    for key, each in outcomes(translation).items():
        found.setdefault(each, set()).add(key)
    return found


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
