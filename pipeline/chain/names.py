"""Names of the hub in a recipe's stages, and which of them say no commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contracts.stage import NamesHub
from pipeline.errors import Problem
from pipeline.recipe.nodes import KeyPath
from pipeline.utils.hub import HubName

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pipeline.recipe import Recipe

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
        here = Path(name.repo).is_dir()
        local = f"for the folder of this name write ./{name.repo}; {PIN_HINT}"
        yield Problem(
            message=branch if name.revision else f"{name.repo} names no commit",
            key=f"{slot}.{key}", hint=local if here else PIN_HINT,
            location=recipe.places.value(field_path(slot, key)), warning=True,
        )  # fmt: skip


def field_path(slot: str, key: str) -> KeyPath:
    """Path of a slot's field in the recipe: of `sources.0.dataset` in the slot `data`,
    `("stages", "data", "sources", 0, "dataset")`."""
    parts = (int(part) if part.isdecimal() else part for part in key.split("."))
    return ("stages", slot, *parts)
