"""Resolve `${...}` with OmegaConf, value by value, so that each mistake has a place.

References are absolute (`${seed}`, `${stages.train.steps}`) or relative (`${.steps}`). The only
function is `${oc.env:NAME}`, with an optional default, for names that stand literally in the
recipe's `env` list; its result is always text and is not looked into again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Problem
from pipeline.marks import Path, dotted
from pipeline.recipe.nodes import Node, plain, walk
from pipeline.suggest import closest

_HIDDEN = "\\${hidden}"
"""Resolves to text that holds `${`, also where another value refers to it."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One `${name:args}`."""

    name: str
    args: tuple[str, ...]


def resolve(root: Node, *, hide_env: bool = False) -> tuple[Any, list[Problem]]:
    """The bare values with interpolations resolved; null where one cannot be.

    With `hide_env`, a value that an environment variable went into holds `${` instead.
    """
    data = plain(root)
    leaves = [(path, node) for path, node in walk(root) if _interpolated(node)]
    if not leaves:
        return data, []
    allowed = _listed(root)
    problems: list[Problem] = []
    sound: list[tuple[Path, Node]] = []
    for path, node in leaves:
        found, calls = _inspect(str(node.value), allowed, hide_env=hide_env)
        problems.extend(
            Problem(message=message, key=dotted(path), location=node.at) for message in found
        )
        if found:
            _put(data, path, None)
        elif hide_env and calls:
            _put(data, path, _HIDDEN)
        if not found:
            sound.append((path, node))
    return data, problems + _fill(data, sound, root)


def _interpolated(node: Node) -> bool:
    return isinstance(node.value, str) and "${" in node.value


def _listed(root: Node) -> set[str]:
    env = root.entries().get("env")
    entries = env.value if env and isinstance(env.value, list) else []
    return {entry.value for entry in entries if isinstance(entry.value, str)}


def _inspect(
    text: str, allowed: Collection[str], *, hide_env: bool
) -> tuple[list[str], list[_Call]]:
    """What is wrong with an interpolation before it is run, and the functions it calls."""
    from omegaconf.errors import GrammarParseError
    from omegaconf.grammar_parser import parse

    try:
        calls = list(_calls(parse(text)))
    except (GrammarParseError, RecursionError):
        return [f"`{text}` is not a valid interpolation"], []
    reasons = (_refusal(call, allowed, hide_env=hide_env) for call in calls)
    return [reason for reason in reasons if reason], calls


def _calls(tree: Any) -> Iterator[_Call]:
    if type(tree).__name__ == "InterpolationResolverContext":
        sequence = tree.sequence()
        args = tuple(element.getText() for element in sequence.element()) if sequence else ()
        yield _Call(name=tree.resolverName().getText(), args=args)
    for child in getattr(tree, "children", None) or ():
        yield from _calls(child)


def _refusal(call: _Call, allowed: Collection[str], *, hide_env: bool) -> str | None:
    if call.name != "oc.env":
        return f"`{call.name}` is not allowed in an interpolation (only `oc.env` is)"
    if not call.args:
        return "`oc.env` needs the name of an environment variable"
    name = call.args[0]
    if name not in allowed:
        return f"environment variable `{name}` is not in the recipe's `env` list (add it there)"
    if len(call.args) == 1 and name not in os.environ and not hide_env:
        hint = f"a default reads ${{oc.env:{name},value}}"
        return f"environment variable `{name}` is not set ({hint})"
    return None


def _fill(data: Any, leaves: list[tuple[Path, Node]], root: Node) -> list[Problem]:
    """Replace every sound interpolation in `data` by its value."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.create(data)
    problems = []
    for path, node in leaves:
        try:
            container: Any = config
            for part in path[:-1]:
                container = container[part]
            value = container[path[-1]]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            value = None
            message, hint = _explain(error, root)
            problem = Problem(message=message, hint=hint, key=dotted(path), location=node.at)
            problems.append(problem)
        _put(data, path, value)
    return problems


def _explain(error: Exception, root: Node) -> tuple[str, str]:
    text = str(error).splitlines()[0]
    if isinstance(error, RecursionError) or "ecursive" in text:
        return "the interpolation leads back to itself", ""
    named = re.search(r"key '(.*?)'|access ([^:]*):", text)
    if named is None:
        return f"the interpolation cannot be resolved: {text}", ""
    key = named[1] or named[2]
    found = closest(key, [".".join(map(str, path)) for path, _ in walk(root) if path])
    hint = f"did you mean `{found}`?" if found else ""
    return f"`${{{key}}}` refers to nothing in this recipe", hint


def _put(data: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        data = data[part]
    data[path[-1]] = value
