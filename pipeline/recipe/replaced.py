"""Slots whose `use` another one has replaced: which fields stay, which are lost, and what is said
of both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from pipeline.errors import Problem
from pipeline.recipe.nodes import Node

Common = Callable[[str, str], Collection[str]]
"""Fields that two stages, by name, have with the same type."""


def stays(root: Node, merged: Node, common: Common) -> tuple[Node, list[Problem]]:
    """`merged`, an override over `root`, with the fields of slots that it has given another `use`,
    and a warning for each of those slots. Fields that both stages have with the same type stay, and
    those that were themselves set on the command line."""
    stages, before = merged.entries().get("stages"), _slots(root)
    if stages is None:
        return merged, []
    entries, notes = dict(stages.entries()), []
    for slot, node in stages.entries().items():
        old = node.replaced
        if old is None or old is not before.get(slot):
            continue
        both = common(_use(old), _use(node))
        kept = {
            key: value
            for key, value in old.entries().items()
            if key in both or (key != "use" and value.at.on_command_line)
            if key not in node.entries()
        }
        places = {key: old.keys[key] for key in kept}
        entries[slot] = replace(
            node, value={**node.entries(), **kept}, keys={**node.keys, **places}
        )
        gone = [key for key in old.entries() if key not in {*kept, *node.entries()}]
        notes += [_kept(slot, old, node, list(kept), gone)] if kept or gone else []
    slots = Node(value=entries, at=stages.at, keys=stages.keys)
    return replace(merged, value={**merged.entries(), "stages": slots}), notes


def _kept(slot: str, old: Node, node: Node, kept: list[str], gone: list[str]) -> Problem:
    parts = [f"kept {', '.join(kept)}"] if kept else []
    parts += [f"dropped {', '.join(gone)}, which it does not have ({old.at})"] * bool(gone)
    return Problem(
        message=f"{_use(old)} became {_use(node)}: {'; '.join(parts)}",
        key=slot, location=node.entries()["use"].at, warning=True,
    )  # fmt: skip


def lost(root: Node, common: Common) -> Iterator[Problem]:
    """A warning for each slot of a file that has replaced a base's slot, with another `use`, and
    does not set a field which the base sets and both stages have."""
    for slot, node in _slots(root).items():
        old, use = node.replaced, node.entries().get("use")
        if old is None or use is None or use.at.on_command_line:
            continue
        both = common(_use(old), _use(node))
        gone = [key for key in old.entries() if key in both and key not in node.entries()]
        if gone:
            yield Problem(
                message=f"replaces {_use(old)} of {old.at} with its {', '.join(gone)}, which "
                f"{'has its default' if len(gone) == 1 else 'have their defaults'} now",
                hint=f"set {' and '.join(gone)} here too",
                key=slot, location=use.at, warning=True,
            )  # fmt: skip


def _slots(root: Node) -> dict[str, Node]:
    stages = root.entries().get("stages")
    return stages.entries() if stages is not None else {}


def _use(slot: Node) -> str:
    use = slot.entries().get("use")
    return str(use.value) if use is not None else ""
