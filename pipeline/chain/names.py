"""Names of the hub in a recipe's stages, and the commits that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.contracts.stage import NamesHub
from pipeline.errors import Problem, RecipeError, StageError
from pipeline.recipe import Recipe
from pipeline.recipe.nodes import KeyPath
from pipeline.utils.hub import HubName, Known, commit_of

PIN_HINT = "`pipe pin` writes its commit into the recipe"


def hub_names(stages: Mapping[str, Any]) -> Iterator[tuple[str, HubName]]:
    """Yield every slot's names of the hub."""
    for slot, stage in stages.items():
        if isinstance(stage, NamesHub):
            yield from ((slot, name) for name in stage.hub_names())


def unpinned(recipe: Recipe, stages: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield, as a warning, each name that says no commit, at its place."""
    for slot, name in hub_names(stages):
        if name.pinned:
            continue
        key = name.key if name.revision else name.named_by
        branch = f"{name.revision!r} is a branch or tag, not a commit"
        local = f"for the folder of this name write ./{name.repo}; {PIN_HINT}"
        message = branch if name.revision else f"{name.repo} names no commit"
        hint = local if Path(name.repo).is_dir() else PIN_HINT
        yield recipe.tree.problem(field_path(slot, key), message, hint, warning=True)


def commits(
    recipe: Recipe, stages: Mapping[str, Any], known: Known, *, ask: bool
) -> dict[KeyPath, tuple[HubName, str]]:
    """Path of each field that says no commit -> its name and the commit; without `ask`, only if it
    is `known`. Raises RecipeError where one cannot be found."""
    found: dict[KeyPath, tuple[HubName, str]] = {}
    problems = []
    for slot, name in hub_names(stages):
        if name.pinned or not (ask or name.asked in known):
            continue
        try:
            found[field_path(slot, name.key)] = name, commit_of(name, known)
        except StageError as error:
            problems.append(recipe.tree.problem(field_path(slot, name.named_by), str(error)))
    if problems:
        raise RecipeError(problems)
    return found


def field_path(slot: str, key: str) -> KeyPath:
    """Path of a slot's field in the recipe: of `sources.0.dataset` in the slot `data`,
    `("stages", "data", "sources", 0, "dataset")`."""
    parts = (int(part) if part.isdecimal() else part for part in key.split("."))
    return ("stages", slot, *parts)
