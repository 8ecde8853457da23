"""`path=value` from the command line, laid over the recipe like one more file.

The path starts with a slot (`train.steps=50`, `wrap.use=wrap.ddp`) or name, seed, launch or env;
numbers address a list's entries. The value is YAML: `50`, `[1, 2]`, `{device: cpu}`, `null`, `''`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import COMMAND_LINE, Location, Problem, RecipeError
from pipeline.recipe.merge import Common, merge, stays
from pipeline.recipe.nodes import KeyPath, Node, UnknownKey, dotted, places_of, plain
from pipeline.recipe.parse import parse
from pipeline.utils.text import closest, did_you_mean

PATH = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
LIKE_ONE = re.compile(
    r"[-+~]*(?P<path>[A-Za-z_][\w-]*(?:[./][\w-]+)*)\s*(?P<mark>[:=]?)\s*(?P<value>.*)"
)
EXAMPLE = "such as train.steps=50"


@dataclass(frozen=True, kw_only=True)
class Meant:
    """The override that a word and `words` after it mean; empty if that cannot be seen."""

    override: str = ""
    words: int = 0
    hint: str = EXAMPLE


def torn(word: str, after: Sequence[str]) -> Meant | None:
    """Return what is meant by a word that is not an override, given those after it; None for
    one."""
    if word.endswith((".yaml", ".yml")) and "=" not in word:
        hint = "a command takes one recipe; name one that it is laid over in its `extends`"
        return Meant(hint=hint)
    if _is_override(word):
        # the shell may have cut the value at its blanks
        for count in range(len(after) + 1):
            if count and _is_override(after[count - 1]):
                return None
            whole = " ".join([word, *after[:count]])
            if _is_yaml(whole.partition("=")[2]):
                return Meant(override=f"'{whole}', in quotes", words=count) if count else None
        return None
    found = LIKE_ONE.fullmatch(word)
    path = found["path"].replace("/", ".") if found else ""
    if found and found["mark"] and found["value"]:
        return Meant(override=f"{path}={found['value']}")
    if "=" in word.strip("= "):
        return None
    if found is None:
        return Meant()
    used = 1 if after[:1] in (["="], [":"]) else 0
    value = after[used] if len(after) > used and not found["value"] else ""
    if not value or ("=" in value and not used):
        return Meant()
    return Meant(override=f"{path}={value.removeprefix('=')}", words=used + 1)


def _is_override(word: str) -> bool:
    path, equals, _ = word.partition("=")
    return bool(equals and PATH.fullmatch(path))


def _is_yaml(text: str) -> bool:
    try:
        return all(True for _ in yaml.parse(text, yaml.SafeLoader))
    except yaml.YAMLError:
        return False


TOP_LEVEL = ("name", "seed", "launch", "env", "dry_run")


class _RefusedError(Exception):
    """The override cannot be applied; says why."""

    def __init__(
        self, message: str, hint: str = "", path: KeyPath = (), value: Any = None, near: str = ""
    ) -> None:
        super().__init__(message)
        self.hint, self.path, self.value, self.near = hint, path, value, near

    def problem(self, override: str, place: Location) -> Problem:
        """The problem, which is one of an unknown key if the path is."""
        message = f"`{override}`: {self}"
        if not self.path:
            return Problem(message=message, hint=self.hint, location=place)
        return UnknownKey(
            message=message, hint=self.hint, location=place,
            path=self.path, value=self.value, closest=self.near,
        )  # fmt: skip


def apply(
    root: Node, overrides: Sequence[str], common: Common
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
            overlay, found = _overlay(root, override, place)
        except _RefusedError as error:
            problems.append(error.problem(override, place))
            continue
        problems.extend(found)
        if not found:
            root, said = stays(root, merge(root, overlay), common)
            notes += said
    return root, problems, notes


def put(root: Node, path: KeyPath, value: Node) -> Node:
    """The tree with a value at a path. Raises RecipeError where that has no parts."""
    try:
        return merge(root, _nest(root, [*map(str, path)], 0, value))
    except _RefusedError as error:
        key = dotted(path)
        problem = Problem(message=str(error), key=key, location=places_of(root).value(path))
        raise RecipeError([problem]) from error


def _overlay(root: Node, override: str, place: Location) -> tuple[Node, list[Problem]]:
    path, _, text = override.partition("=")
    parts = path.split(".")
    if not all(parts):
        raise _RefusedError("the path before = has an empty part", "such as train.steps=50")
    value, found = _value(path, text, place)
    stages = root.entries().get("stages")
    first, known = parts[0], [*(stages.entries() if stages else ()), *TOP_LEVEL]
    if first == "stages" and len(parts) > 1:
        raise _RefusedError("a path starts with the slot", f"write {'.'.join(parts[1:])}=...")
    if first not in known:
        hint, near, given = did_you_mean(first, known), closest(first, known) or "", plain(value)
        raise _RefusedError(f"the recipe has no slot `{first}`", hint, tuple(parts), given, near)
    full = parts if first in TOP_LEVEL else ["stages", *parts]
    return _nest(root, full, 0, value), found


def _value(path: str, text: str, place: Location) -> tuple[Node, list[Problem]]:
    node, found = parse(text, locate=lambda line, column: place, folder=Path.cwd())
    if node is None and not found:
        hint = f"write {path}=null or {path}=''; put quotes around text that starts with #"
        raise _RefusedError("there is no value after =", hint)
    return node or Node(value=None, at=place), found


def _nest(base: Node | None, parts: list[str], depth: int, value: Node) -> Node:
    """`value` at `parts[depth:]` below `base`, as an overlay for it."""
    if depth == len(parts):
        return value
    part = parts[depth]
    if base is not None and isinstance(base.value, list):
        return _nest_in_list(base, base.value, parts, depth, value)
    if base is not None and base.value is not None and not isinstance(base.value, dict):
        above = dotted(tuple(parts[:depth]))
        hint = f"write {above}=VALUE, or the name of another field"
        raise _RefusedError(f"`{above}` is one value, `{base.value}`", hint)
    child = _nest(base.entries().get(part) if base else None, parts, depth + 1, value)
    return Node(value={part: child}, at=value.at, keys={part: value.at})


def _nest_in_list(
    base: Node, entries: list[Node], parts: list[str], depth: int, value: Node
) -> Node:
    part = parts[depth]
    if not part.isdecimal() or int(part) >= len(entries):
        count = len(entries)
        raise _RefusedError(
            f"`{part}` is not an entry of a list of {count}", "entries count from 0"
        )
    index = int(part)
    # a list replaces the one below it, so the overlay carries all of it
    child = _nest(entries[index], parts, depth + 1, value)
    merged = merge(entries[index], child) if isinstance(child.value, dict) else child
    return Node(value=[*entries[:index], merged, *entries[index + 1 :]], at=base.at)
