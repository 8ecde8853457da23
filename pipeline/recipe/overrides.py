"""`path=value` from the command line, laid over the recipe like one more file.

The path starts with a slot (`train.steps=50`, `wrap.use=wrap.ddp`) or name, seed, launch or env;
numbers address a list's entries. The value is YAML: `50`, `[1, 2]`, `{device: cpu}`, `null`, `''`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline.errors import COMMAND_LINE, Location, Problem, RecipeError
from pipeline.recipe.merge import Common, merge, stays
from pipeline.recipe.nodes import KeyPath, Node, UnknownKey, dotted, plain
from pipeline.recipe.parse import parse
from pipeline.utils.text import closest, did_you_mean

PATH = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
LIKE_ONE = re.compile(
    r"[-+~]*(?P<path>[A-Za-z_][\w-]*(?:[./][\w-]+)*)\s*(?P<mark>[:=]?)\s*(?P<value>.*)"
)
EXAMPLE = "such as train.steps=50"
TOP_LEVEL = ("name", "seed", "launch", "env", "dry_run")


class Meant(NamedTuple):
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


def _is_yaml(text: str) -> bool:
    try:
        return all(True for _ in yaml.parse(text, yaml.SafeLoader))
    except yaml.YAMLError:
        return False


class _RefusedError(Exception):
    """The override cannot be applied; says why."""

    def __init__(self, message: str, hint: str = "", **unknown: Any) -> None:
        """`unknown` are the fields of the UnknownKey that it is, if it is one."""
        super().__init__(message)
        self.hint, self.unknown = hint, unknown

    def problem(self, override: str, place: Location) -> Problem:
        kind: type[Problem] = UnknownKey if self.unknown else Problem
        message = f"`{override}`: {self}"
        return kind(message=message, hint=self.hint, location=place, **self.unknown)


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
        raise RecipeError([root.problem(path, str(error))]) from error


def _overlay(root: Node, override: str, place: Location) -> tuple[Node, list[Problem]]:
    path, _, text = override.partition("=")
    parts = path.split(".")
    if not all(parts):
        raise _RefusedError("the path before = has an empty part", EXAMPLE)
    value, found = parse(text, locate=lambda line, column: place, folder=Path.cwd())
    if value is None and not found:
        hint = f"write {path}=null or {path}=''; put quotes around text that starts with #"
        raise _RefusedError("there is no value after =", hint)
    value = value or Node(value=None, at=place)
    first, known = parts[0], [*root.slots(), *TOP_LEVEL]
    if first == "stages" and len(parts) > 1:
        raise _RefusedError("a path starts with the slot", f"write {'.'.join(parts[1:])}=...")
    if first not in known:
        near, path_of = closest(first, known) or "", tuple(parts)
        message, hint = f"the recipe has no slot `{first}`", did_you_mean(first, known)
        raise _RefusedError(message, hint, path=path_of, value=plain(value), closest=near)
    return _nest(root, parts if first in TOP_LEVEL else ["stages", *parts], 0, value), found


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
