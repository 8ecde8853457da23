"""Lay one recipe over another.

Mappings merge key by key, anything else replaces. In `stages`, an overlay slot that names another
`use` replaces the whole slot, one that names none or the same merges into it, and null removes it.
Order is the base's. A new slot comes right after the one that precedes it in the overlay, or last
if none does. Works on nodes, so every value keeps the place it was written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from pipeline.errors import Problem
from pipeline.recipe.nodes import KeyPath, Node

Common = Callable[[str, str], Collection[str]]
"""Fields that two stages, by name, have with the same type."""


def merge(base: Node, overlay: Node) -> Node:
    """`overlay` over `base`, both a recipe's root."""
    merged = _merge_maps(base, overlay)
    ours, theirs = base.entries().get("stages"), overlay.entries().get("stages")
    if ours is None or theirs is None or not isinstance(theirs.value, dict):
        return merged
    stages = ours if isinstance(ours.value, dict) else Node(value={}, at=theirs.at)
    entries = {**merged.entries(), "stages": _merge_slots(stages, theirs)}
    return Node(value=entries, at=merged.at, keys=merged.keys)


def drop_removed(root: Node) -> Node:
    """Remove slots that are null and that no base ever filled."""
    return root.with_slots({k: node for k, node in root.slots().items() if node.value is not None})


def _merge_maps(base: Node, overlay: Node) -> Node:
    entries, keys = dict(base.entries()), dict(base.keys)
    for key, child in overlay.entries().items():
        if key in entries and _are_maps(entries[key], child):
            entries[key] = _merge_maps(entries[key], child)
        else:
            entries[key], keys[key] = child, overlay.keys[key]
    return Node(value=entries, at=base.at, keys=keys, replaced=base.replaced)


def _merge_slots(base: Node, overlay: Node) -> Node:
    entries, keys = dict(base.entries()), dict(base.keys)
    order, before = list(entries), ""
    for slot, theirs in overlay.entries().items():
        if slot not in order:
            order.insert(order.index(before) + 1 if before else len(order), slot)
        before = slot
        ours = entries.get(slot)
        if theirs.value is None and ours is not None:
            del entries[slot]
        elif ours is None or _other_stage(ours, theirs):
            entries[slot], keys[slot] = replace(theirs, replaced=ours), overlay.keys[slot]
        else:
            entries[slot] = _merge_maps(ours, theirs) if _are_maps(ours, theirs) else theirs
    in_order = {slot: entries[slot] for slot in order if slot in entries}
    return Node(value=in_order, at=base.at, keys=keys)


def _are_maps(*nodes: Node) -> bool:
    return all(isinstance(node.value, dict) for node in nodes)


def _other_stage(ours: Node, theirs: Node) -> bool:
    before, use = ours.entries().get("use"), theirs.entries().get("use")
    return before is not None and use is not None and before.value != use.value


def _use(slot: Node) -> str:
    use = slot.entries().get("use")
    return str(use.value) if use is not None else ""


def stays(root: Node, merged: Node, common: Common) -> tuple[Node, list[Problem]]:
    """`merged`, an override over `root`, with the fields of slots that it has given another `use`,
    and a warning for each of those slots. Fields that both stages have with the same type stay, and
    so do fields set on the command line."""
    slots, notes, before = merged.slots(), [], root.slots()
    changed = dict(slots)
    for slot, node in slots.items():
        old, own = node.replaced, node.entries()
        if old is None or old is not before.get(slot):
            continue
        both = common(_use(old), _use(node))
        kept = {
            key: value
            for key, value in old.entries().items()
            if (key in both or (key != "use" and value.at.on_command_line)) and key not in own
        }
        gone = [key for key in old.entries() if key not in {*kept, *own}]
        keys = {**node.keys, **{key: old.keys[key] for key in kept}}
        changed[slot] = replace(node, value={**own, **kept}, keys=keys)
        parts = [f"kept {', '.join(kept)}"] if kept else []
        parts += [f"dropped {', '.join(gone)}, which it does not have ({old.at})"] if gone else []
        if parts:
            message = f"{_use(old)} became {_use(node)}: {'; '.join(parts)}"
            place = own["use"].at
            notes.append(Problem(message=message, key=slot, location=place, warning=True))
    return merged.with_slots(changed), notes


def lost(root: Node, common: Common) -> Iterator[Problem]:
    """A warning for each slot of a file that has replaced a base's slot, with another `use`, and
    does not set a field which the base sets and both stages have."""
    for slot, node in root.slots().items():
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


FORMER = {"allow_floating_revision": "leave it out: names without a commit are accepted"}
"""Field that has no effect any more -> what to do."""


def without_former(root: Node) -> tuple[Node, list[Problem]]:
    """The tree without former fields of stages, and a warning for each."""
    problems: list[Problem] = []

    def kept(node: Node, path: KeyPath) -> Node:
        if isinstance(node.value, list):
            return replace(node, value=[kept(one, (*path, n)) for n, one in enumerate(node.value)])
        entries = {}
        for key, one in node.entries().items():
            if key not in FORMER:
                entries[key] = kept(one, (*path, key))
                continue
            message = "is not a field any more, and has no effect"
            problems.append(
                root.problem((*path, key), message, FORMER[key], at_key=True, warning=True)
            )
        return replace(node, value=entries) if isinstance(node.value, dict) else node

    slots = {slot: kept(node, ("stages", slot)) for slot, node in root.slots().items()}
    return root.with_slots(slots), problems
