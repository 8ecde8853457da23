"""Fields of earlier versions, which the recipes in folders of their runs still have."""

from __future__ import annotations

from dataclasses import replace

from pipeline.errors import Problem
from pipeline.recipe.nodes import KeyPath, Node, dotted

FORMER = {"allow_floating_revision": "leave it out: names without a commit are accepted"}
"""Field that has no effect any more -> what to do."""


def without_former(root: Node) -> tuple[Node, list[Problem]]:
    """The tree without former fields of stages, and a warning for each."""
    problems: list[Problem] = []

    def kept(node: Node, path: KeyPath) -> Node:
        if isinstance(node.value, list):
            return replace(node, value=[kept(one, (*path, n)) for n, one in enumerate(node.value)])
        if not isinstance(node.value, dict):
            return node
        gone = [key for key in node.value if key in FORMER] if len(path) > 1 else []
        for key in gone:
            problems.append(
                Problem(
                    message="is not a field any more, and has no effect",
                    key=dotted((*path, key)), hint=FORMER[key], location=node.keys[key],
                    warning=True,
                )
            )  # fmt: skip
        entries = {
            key: kept(one, (*path, key)) for key, one in node.value.items() if key not in gone
        }
        keys = {key: place for key, place in node.keys.items() if key not in gone}
        return replace(node, value=entries, keys=keys)

    stages = root.entries().get("stages")
    if stages is None:
        return root, []
    entries = {**root.entries(), "stages": kept(stages, ("stages",))}
    return replace(root, value=entries), problems
