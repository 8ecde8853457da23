"""Recipes that come with this distribution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pipeline
from pipeline.errors import UsageError
from pipeline.utils.text import did_you_mean


def shipped() -> dict[str, Path]:
    """Return name -> file of the recipes that are installed, or lie in this checkout."""
    package = Path(pipeline.__file__).parent
    for folder in (package / "shipped_recipes", package.parent / "recipes"):
        found = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
        if found:
            return found
    return {}


def shipped_recipe(name: str) -> Path:
    """Return the file of a recipe. Raises UsageError for a name that is not shipped."""
    known = shipped()
    wanted = name.removesuffix(".yaml")
    if wanted not in known:
        raise UsageError(f"no recipe is called {name}", hint=did_you_mean(wanted, known))
    return known[wanted]


def by_use(stages: Sequence[str]) -> list[str]:
    """Return names of stages, most used in shipped recipes first."""
    texts = [file.read_text("utf-8") for file in shipped().values()]
    return sorted(stages, key=lambda name: -sum(f"use: {name}" in text for text in texts))
