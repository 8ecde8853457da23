"""Lay one recipe over another: files, and `path=value` from the command line.

Mappings merge key by key, anything else replaces. In `stages`, an overlay slot that names another
`use` replaces the whole slot, one that names none or the same merges into it, and null removes it.
Order is the base's. A new slot comes right after the one that precedes it in the overlay, or last
if none does. Works on nodes, so every value keeps the place it was written.

The path of an override starts with a slot (`train.steps=50`, `wrap.use=wrap.ddp`) or a key of the
recipe's header (`seed=1`); numbers address a list's entries. The value is YAML: `50`, `[1, 2]`,
`{device: cpu}`, `null`, `''`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import yaml

from pipeline.errors import COMMAND_LINE, Location, Problem, RecipeError
from pipeline.recipe.nodes import KeyPath, Node, UnknownKey, dotted, plain, walk
from pipeline.recipe.parse import parse
from pipeline.utils.text import closest, did_you_mean

PATH = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
LIKE_ONE = re.compile(
    r"[-+~]*(?P<path>[A-Za-z_][\w-]*(?:[./][\w-]+)*)\s*(?P<mark>[:=]?)\s*(?P<value>.*)"
)
EXAMPLE = "such as train.steps=50"
Common = Callable[[str, str], Collection[str]]
"""Fields that two stages, by name, have with the same type."""


def merge(base: Node, overlay: Node) -> Node:
    """`overlay` over `base`, both a recipe's root."""
    merged = _merge_maps(base, overlay)
    ours, theirs = base.entries().get("stages"), overlay.entries().get("stages")
    if ours is None or theirs is None or not isinstance(theirs.value, dict):
        return merged
    stages = ours if isinstance(ours.value, dict) else Node(value={}, at=theirs.at)
    entries, keys, before = dict(stages.entries()), dict(stages.keys), ""
    order = list(entries)
    for slot, new in theirs.entries().items():
        if slot not in order:
            order.insert(order.index(before) + 1 if before else len(order), slot)
        before, old = slot, entries.get(slot)
        if new.value is None and old is not None:
            del entries[slot]
        elif old is None or (_use(old) and _use(new) and _use(old) != _use(new)):
            entries[slot], keys[slot] = replace(new, replaced=old), theirs.keys[slot]
        else:
            entries[slot] = _merge_maps(old, new) if _are_maps(old, new) else new
    in_order = {slot: entries[slot] for slot in order if slot in entries}
    slots = Node(value=in_order, at=stages.at, keys=keys)
    return Node(value={**merged.entries(), "stages": slots}, at=merged.at, keys=merged.keys)


def _merge_maps(base: Node, overlay: Node) -> Node:
    entries, keys = dict(base.entries()), dict(base.keys)
    for key, child in overlay.entries().items():
        if key in entries and _are_maps(entries[key], child):
            entries[key] = _merge_maps(entries[key], child)
        else:
            entries[key], keys[key] = child, overlay.keys[key]
    return Node(value=entries, at=base.at, keys=keys, replaced=base.replaced)


def _are_maps(*nodes: Node) -> bool:
    return all(isinstance(node.value, dict) for node in nodes)


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
    message = "is not a field any more, and has no effect"
    problems = [
        root.problem(path, message, FORMER[str(path[-1])], at_key=True, warning=True)
        for path, _ in walk(root)
        if path[:1] == ("stages",) and len(path) > 2 and path[-1] in FORMER
    ]

    def kept(node: Node) -> Node:
        if isinstance(node.value, list):
            return replace(node, value=[kept(one) for one in node.value])
        entries = {key: kept(one) for key, one in node.entries().items() if key not in FORMER}
        return replace(node, value=entries) if isinstance(node.value, dict) else node

    return root.with_slots({slot: kept(node) for slot, node in root.slots().items()}), problems


class Meant(NamedTuple):
    """The override that a word and `words` after it mean; empty if that cannot be seen."""

    override: str = ""
    words: int = 0
    hint: str = EXAMPLE


def torn(word: str, after: Sequence[str]) -> Meant | None:
    """Return what is meant by a word, given those after it; None for an override."""
    if word.endswith((".yaml", ".yml")) and "=" not in word:
        hint = "a command takes one recipe; name one that it is laid over in its `extends`"
        return Meant(hint=hint)
    if _is_override(word):
        # the shell may have cut the value at its blanks
        for count in range(len(after) + 1):
            if count and _is_override(after[count - 1]):
                return None
            whole = " ".join([word, *after[:count]])
            with contextlib.suppress(yaml.YAMLError):
                for _ in yaml.parse(whole.partition("=")[2], yaml.SafeLoader):
                    pass
                return Meant(f"'{whole}', in quotes", count) if count else None
        return None
    found = LIKE_ONE.fullmatch(word)
    if found and found["mark"] and found["value"]:
        return Meant(f"{found['path'].replace('/', '.')}={found['value']}")
    if "=" in word.strip("= "):
        return None
    used = 1 if after[:1] in (["="], [":"]) else 0
    value = after[used] if len(after) > used and found and not found["value"] else ""
    if found is None or not value or ("=" in value and not used):
        return Meant()
    return Meant(f"{found['path'].replace('/', '.')}={value.removeprefix('=')}", used + 1)


def _is_override(word: str) -> bool:
    path, equals, _ = word.partition("=")
    return bool(equals and PATH.fullmatch(path))


class _RefusedError(Exception):
    """The override cannot be applied: why, a hint, and fields of the UnknownKey if it is one."""


def apply(
    root: Node, overrides: Sequence[str], header: Sequence[str], common: Common
) -> tuple[Node, list[Problem], list[Problem]]:
    """The tree with the overrides applied in order, the problems of wrong ones, and warnings of
    slots that got another `use`, in which fields of `common` stay."""
    problems: list[Problem] = []
    notes: list[Problem] = []
    words = [*enumerate(overrides, start=1)]
    while words:
        number, override = words.pop(0)
        place = Location(file=f"{COMMAND_LINE}override {number}")
        meant = torn(override, [word for _, word in words])
        if meant is not None:
            written = " ".join([override, *(word for _, word in words[: meant.words])])
            hint = f"write {meant.override}" if meant.override else meant.hint
            message = f"`{written}`: an override reads path=value"
            problems.append(Problem(message=message, hint=hint, location=place))
            del words[: meant.words]
            continue
        try:
            overlay, found = _overlay(root, override, header, place)
        except _RefusedError as error:
            message, hint, *unknown = error.args
            kind, more = (UnknownKey, unknown[0]) if unknown else (Problem, {})
            wrong = f"`{override}`: {message}"
            problems.append(kind(message=wrong, hint=hint, location=place, **more))
            continue
        problems += found
        if not found:
            root, said = stays(root, merge(root, overlay), common)
            notes += said
    return root, problems, notes


def put(root: Node, path: KeyPath, value: Node) -> Node:
    """The tree with a value at a path. Raises RecipeError where that has no parts."""
    try:
        return merge(root, _nest(root, [*map(str, path)], 0, value))
    except _RefusedError as error:
        raise RecipeError([root.problem(path, error.args[0])]) from error


def _overlay(
    root: Node, override: str, header: Sequence[str], place: Location
) -> tuple[Node, list[Problem]]:
    path, _, text = override.partition("=")
    parts = path.split(".")
    if not all(parts):
        raise _RefusedError("the path before = has an empty part", EXAMPLE)
    value, found = parse(text, locate=lambda line, column: place, folder=Path.cwd())
    if value is None and not found:
        hint = f"write {path}=null or {path}=''; put quotes around text that starts with #"
        raise _RefusedError("there is no value after =", hint)
    value = value or Node(value=None, at=place)
    first, known = parts[0], [*root.slots(), *header]
    if first == "stages" and len(parts) > 1:
        raise _RefusedError("a path starts with the slot", f"write {'.'.join(parts[1:])}=...")
    if first not in known:
        message, hint = f"the recipe has no slot `{first}`", did_you_mean(first, known)
        more = {"path": tuple(parts), "value": plain(value), "closest": closest(first, known) or ""}
        raise _RefusedError(message, hint, more)
    return _nest(root, parts if first in header else ["stages", *parts], 0, value), found


def _nest(base: Node | None, parts: list[str], depth: int, value: Node) -> Node:
    """`value` at `parts[depth:]` below `base`, as an overlay for it."""
    if depth == len(parts):
        return value
    part = parts[depth]
    if base is None or base.value is None or isinstance(base.value, dict):
        child = _nest(base.entries().get(part) if base else None, parts, depth + 1, value)
        return Node(value={part: child}, at=value.at, keys={part: value.at})
    if not isinstance(base.value, list):
        above = dotted(tuple(parts[:depth]))
        hint = f"write {above}=VALUE, or the name of another field"
        raise _RefusedError(f"`{above}` is one value, `{base.value}`", hint)
    entries = list(base.value)
    if not part.isdecimal() or int(part) >= len(entries):
        message = f"`{part}` is not an entry of a list of {len(entries)}"
        raise _RefusedError(message, "entries count from 0")
    # a list replaces the one below it, so the overlay carries all of it
    old = entries[int(part)]
    child = _nest(old, parts, depth + 1, value)
    entries[int(part)] = merge(old, child) if isinstance(child.value, dict) else child
    return Node(value=entries, at=base.at)
