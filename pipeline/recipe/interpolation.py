"""Resolve `${...}` with OmegaConf, value by value, so that each mistake has a place.

References are absolute (`${seed}`, `${stages.train.steps}`) or relative (`${.steps}`). The only
function is `${oc.env:NAME}`, with an optional default, for names that stand literally in the
recipe's `env` list; its result is always text and is not looked into again."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.errors import Problem
from pipeline.recipe.nodes import KeyPath, Node, plain, put, walk
from pipeline.utils.terminal import hide
from pipeline.utils.text import closest

MAX_EXPANSIONS = 1000
"""Limit on interpolations resolved in one recipe, each counted as often as it is reached."""
MAX_IN_TEXT = 50
"""Limit on interpolations in one text; parsing nested ones takes a power of their number."""
HIDDEN = "\\${hidden}"
"""Resolves to text that holds `${`, also where another value refers to it."""
OPENING = re.compile(r"(?P<escapes>\\*)\$\{")
CALL = re.compile(r"\s*(?P<function>[\w.]+)\s*:\s*(?P<name>[^,}]*?)\s*(?P<end>[,}])")
REFERENCE = re.compile(r"\s*(?P<path>[\w.\[\]-]+)\s*\}")


class Text(NamedTuple):
    """Function calls and references in one text."""

    calls: list[tuple[str, str, bool]]
    """Function, first argument, and whether there are more, of each `${function:argument,more}`."""
    references: list[str]
    """`stages.train.steps` of `${stages.train.steps}`."""
    fault: str = ""
    """Why it cannot be resolved at all."""


def read(text: str) -> Text:
    """Find the interpolations, without resolving any: each unescaped `${`, wherever it stands."""
    found = Text([], [])
    if text.count("${") > MAX_IN_TEXT:
        return found._replace(fault=f"more than {MAX_IN_TEXT} interpolations in one text")
    for opening in OPENING.finditer(text):
        in_default = any(more for _, _, more in found.calls)  # where omegaconf knows no escape
        if len(opening["escapes"]) % 2 and not in_default:
            continue
        if call := CALL.match(text, opening.end()):
            found.calls.append((call["function"], call["name"], call["end"] == ","))
        elif reference := REFERENCE.match(text, opening.end()):
            found.references.append(reference["path"])
        elif re.match(r"[^{}]*\$\{", text[opening.end() :]):
            return found._replace(fault="a reference inside of a reference is not allowed")
        else:
            return found._replace(fault=f"`{text}` is not a valid interpolation")
    return found


def expansions(references: Mapping[KeyPath, Collection[str]]) -> int:
    """Number of interpolations to resolve, by each value's references; at most past the limit."""
    if len(references) > MAX_EXPANSIONS:
        return len(references)
    leaves: dict[KeyPath, KeyPath] = {tuple(map(str, path)): path for path in references}
    known: dict[KeyPath, int] = {}

    def cost(leaf: KeyPath) -> int:
        if leaf not in known:
            known[leaf] = 1  # what leads back here is a circle; resolving stops at it
            for reference in references[leaves[leaf]]:
                # one leading dot is the mapping that it stands in, each further dot one level up
                name = reference.lstrip(".")
                dots = len(reference) - len(name)
                start = leaf[: max(len(leaf) - dots, 0)] if dots else ()
                to = (*start, *re.findall(r"[^.\[\]]+", name))
                # a target may hold another leaf, or lie in what that becomes
                pairs = ((one, zip(to, one, strict=False)) for one in leaves)
                known[leaf] += sum(cost(one) for one, pair in pairs if all(a == b for a, b in pair))
        return known[leaf]

    try:
        return sum(map(cost, leaves))
    except RecursionError:
        return MAX_EXPANSIONS + 1


def resolve(root: Node, *, hide_env: bool = False) -> tuple[Any, list[Problem]]:
    """The bare values with interpolations resolved; null where one cannot be.

    With `hide_env`, a value that an environment variable went into holds `${` instead."""
    data, env = plain(root), root.written(("env",))
    found = {
        path: read(node.value)
        for path, node in walk(root)
        if isinstance(node.value, str) and "${" in node.value
    }
    if expansions({path: text.references for path, text in found.items()}) > MAX_EXPANSIONS:
        for path in found:
            put(data, path, None)
        message = f"interpolations expand to more than {MAX_EXPANSIONS}"
        return data, [Problem(message=message, location=root.place([*found][-1]))]
    allowed = [name for name in env if isinstance(name, str)] if isinstance(env, list) else []
    problems: list[Problem] = []
    sound: list[KeyPath] = []
    for path, text in found.items():
        refusals = (_refusal(call, allowed, hide_env=hide_env) for call in text.calls)
        if reasons := [reason for reason in (text.fault, *refusals) if reason]:
            problems += [root.problem(path, reason) for reason in reasons]
            put(data, path, None)
            continue
        sound.append(path)
        # values of the environment are not said again, here or in logs
        for _, name, _ in text.calls:
            hide(os.environ.get(name, ""), f"${name}")
        if hide_env and text.calls:
            put(data, path, HIDDEN)
    return data, [*problems, *(_fill(data, sound, root) if sound else ())]


def _refusal(
    call: tuple[str, str, bool], allowed: Collection[str], *, hide_env: bool
) -> str | None:
    """A mistake that is found before a call is resolved."""
    function, name, has_default = call
    if function != "oc.env":
        return f"`{function}` is not allowed in an interpolation (only `oc.env` is)"
    if not name:
        return "`oc.env` needs the name of an environment variable"
    if name not in allowed:
        hint = f"add `env: [{name}]` at the top"
        return f"environment variable `{name}` is not in the recipe's `env` list ({hint})"
    if not has_default and name not in os.environ and not hide_env:
        hint = f"a default reads ${{oc.env:{name},value}}"
        return f"environment variable `{name}` is not set ({hint})"
    return None


def _fill(data: Any, sound: Sequence[KeyPath], root: Node) -> Iterator[Problem]:
    """Replace every sound interpolation in `data` by its value; yield problems of the others."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.create(data)
    for path in sound:
        try:
            value: Any = config
            for part in path:
                value = value[part]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            value, text, hint = None, str(error).splitlines()[0], ""
            named = re.search(r"key '(.*?)'|access ([^:]*):", text)
            message = f"the interpolation cannot be resolved: {text}"
            if isinstance(error, RecursionError) or "ecursive" in text:
                message = "the interpolation leads back to itself"
            elif named is not None:
                key = named[1] or named[2]
                found = closest(key, [".".join(map(str, path)) for path, _ in walk(root) if path])
                message = f"`${{{key}}}` refers to nothing in this recipe"
                hint = f"did you mean `{found}`?" if found else ""
                if key.isupper():
                    env = f"${{oc.env:{key}}} and `env: [{key}]`"
                    hint = f"for the environment variable, write {env} at the top"
            yield root.problem(path, message, hint)
        put(data, path, value)
