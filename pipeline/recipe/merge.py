"""Lay one recipe over another.

Mappings merge key by key, anything else replaces. In `stages`, an overlay slot that names another
`use` replaces the whole slot, one that names none or the same merges into it, and null removes it.
Order is the base's. A new slot comes right after the one that precedes it in the overlay, or last
if none does. Works on nodes, so every value keeps the place it was written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from pipeline.errors import Problem
from pipeline.recipe.nodes import KeyPath, Node, dotted


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
    stages = root.entries().get("stages")
    if stages is None or not isinstance(stages.value, dict):
        return root
    kept = {slot: node for slot, node in stages.entries().items() if node.value is not None}
    keys = {slot: place for slot, place in stages.keys.items() if slot in kept}
    entries = {**root.entries(), "stages": Node(value=kept, at=stages.at, keys=keys)}
    return Node(value=entries, at=root.at, keys=root.keys)


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
            del entries[slot], keys[slot]
        elif ours is None or _other_stage(ours, theirs):
            entries[slot], keys[slot] = replace(theirs, replaced=ours), overlay.keys[slot]
        else:
            entries[slot] = _merge_maps(ours, theirs) if _are_maps(ours, theirs) else theirs
    in_order = {slot: entries[slot] for slot in order if slot in entries}
    return Node(value=in_order, at=base.at, keys=keys)


def _are_maps(*nodes: Node) -> bool:
    return all(isinstance(node.value, dict) for node in nodes)


def _other_stage(ours: Node, theirs: Node) -> bool:
    use = theirs.entries().get("use")
    before = ours.entries().get("use")
    return use is not None and before is not None and use.value != before.value


Common = Callable[[str, str], Collection[str]]
"""Fields that two stages, by name, have with the same type."""


def stays(root: Node, merged: Node, common: Common) -> tuple[Node, list[Problem]]:
    """`merged`, an override over `root`, with the fields of slots that it has given another `use`,
    and a warning for each of those slots. Fields that both stages have with the same type stay, and
    so do fields set on the command line."""
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
