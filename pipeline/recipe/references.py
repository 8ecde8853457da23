"""How much work a recipe's interpolations are, told before any is resolved.

`a: ${b}${b}`, `b: ${c}${c}`, ... doubles with every line; OmegaConf would follow all of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from pipeline.marks import Path

MAX_EXPANSIONS = 2000
"""Interpolations resolved for a whole recipe, each counted as often as it is reached."""


def target(reference: str, path: Path) -> Path:
    """The path that `${reference}`, written at `path`, points to; keys and indexes as text.

    One leading dot is the mapping it stands in, each further dot one level up.
    """
    name = reference.lstrip(".")
    dots = len(reference) - len(name)
    start = path[: max(len(path) - dots, 0)] if dots else ()
    return (*map(str, start), *re.findall(r"[^.\[\]]+", name))


def expansions(references: Mapping[Path, Collection[str]]) -> int:
    """How many interpolations are resolved, from each interpolated value's references."""
    leaves = {tuple(map(str, path)): path for path in references}
    known: dict[Path, int] = {}

    def cost(leaf: Path) -> int:
        if leaf not in known:
            known[leaf] = 1  # what leads back here is a circle; resolving stops at it
            path = leaves[leaf]
            targets = [target(reference, path) for reference in references[path]]
            known[leaf] += sum(cost(other) for to in targets for other in leaves if _meet(to, other))
        return known[leaf]

    return sum(cost(leaf) for leaf in leaves)


def _meet(one: Path, other: Path) -> bool:
    """Whether one path is the other or lies below it."""
    return all(left == right for left, right in zip(one, other, strict=False))
