"""Lay one recipe over another.

Mappings merge key by key, anything else replaces. In `stages`, an overlay slot that names another
`use` replaces the whole slot, one that names none or the same merges into it, and null removes it.
Order is the base's. A new slot comes right behind the one that stands before it in the overlay, or
last if none does. Works on nodes, so every value keeps the place it was written.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.recipe.nodes import Node


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
