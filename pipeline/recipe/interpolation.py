r"""Interpolations: references to other values of the recipe, and environment variables.

References are absolute (`${seed}`, `${stages.train.steps}`) or relative (`${.steps}`; each further
dot is one level up). The only function is `${oc.env:NAME}`, with an optional default, for names
that stand literally in the recipe's `env` list; its result is text and is not resolved again.
`\${` is a literal `${`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from pipeline.errors import Problem
from pipeline.recipe.nodes import KeyPath, Node, dotted, plain, walk
from pipeline.utils.terminal import hide
from pipeline.utils.text import closest

MAX_EXPANSIONS = 1000
"""Limit on interpolations resolved in one recipe, each counted as often as it is reached."""
_INTERPOLATION = re.compile(r"(?P<slashes>\\*)\$\{(?:(?P<inner>[^${}]*)\})?")
_CALL = re.compile(r"\s*(?P<function>[\w.]+)\s*:\s*(?P<name>[^,]*?)\s*(?:,\s*(?P<default>.*?)\s*)?")


class _UnresolvedError(Exception):
    """An interpolation cannot be resolved; says why."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def resolve(root: Node, *, hide_env: bool = False) -> tuple[Any, list[Problem]]:
    """The bare values with interpolations resolved; null where one cannot be.

    With `hide_env`, a value that an environment variable went into holds `${` instead.
    """
    data, problems = plain(root), []
    resolver = _Resolver(root, hide_env=hide_env)
    leaves = [(path, node) for path, node in walk(root) if _interpolated(node.value)]
    # A value that refers to a wrong one is not reported as well, so all are checked first.
    for attempt in (resolver.check, resolver.value):
        for path, node in leaves:
            value = None
            try:
                if path not in resolver.wrong and resolver.left >= 0:
                    value = attempt(str(node.value), path)
            except (_UnresolvedError, RecursionError) as error:
                resolver.wrong.add(path)
                known = isinstance(error, _UnresolvedError)
                message = str(error) if known else "interpolations refer to each other too often"
                key, hint = dotted(path), getattr(error, "hint", "")
                problems.append(Problem(message=message, key=key, hint=hint, location=node.at))
            _put(data, path, value)
    return data, problems


class _Resolver:
    def __init__(self, root: Node, *, hide_env: bool) -> None:
        self._root, self._data, self._hide_env = root, plain(root), hide_env
        env = self._data.get("env")
        self._allowed = env if isinstance(env, list) else []
        self.wrong: set[KeyPath] = set()
        """Paths of values that have been reported."""
        self.left = MAX_EXPANSIONS

    def check(self, text: str, path: KeyPath) -> None:
        """Raise _UnresolvedError for mistakes that show without resolving anything."""
        for call in filter(None, (_CALL.fullmatch(inner) for _, inner in _parts(text))):
            name, default = call["name"], call["default"]
            if call["function"] != "oc.env":
                message = f"`{call['function']}` is not allowed in an interpolation"
                raise _UnresolvedError(message, "only `oc.env` is")
            if not name:
                raise _UnresolvedError("`oc.env` needs the name of an environment variable")
            if name not in self._allowed:
                message = f"environment variable `{name}` is not in the recipe's `env` list"
                raise _UnresolvedError(message, "add it there")
            if default is None and name not in os.environ and not self._hide_env:
                hint = f"a default reads ${{oc.env:{name},value}}"
                raise _UnresolvedError(f"environment variable `{name}` is not set", hint)

    def value(self, text: str, path: KeyPath, chain: tuple[KeyPath, ...] = ()) -> Any:
        """The value of `text` at `path`, to which the values at `chain` refer."""
        if path in chain:
            raise _UnresolvedError("the interpolation leads back to itself")
        if path in self.wrong:
            return None
        found: list[Any] = []
        for literal, inner in _parts(text):
            found += [literal] if literal else []
            if inner:
                self.left -= 1
                if self.left < 0:
                    raise _UnresolvedError(f"interpolations expand to more than {MAX_EXPANSIONS}")
                found.append(self._resolved(inner, path, (*chain, path)))
        return found[0] if len(found) == 1 else "".join(map(str, found))

    def _resolved(self, inner: str, path: KeyPath, chain: tuple[KeyPath, ...]) -> Any:
        """The value of `${inner}`, written at `path`."""
        if call := _CALL.fullmatch(inner):
            name, default = call["name"], (call["default"] or "").strip("\"'")
            hide(os.environ.get(name, ""), f"${name}")  # in messages and logs
            return "${hidden}" if self._hide_env else os.environ.get(name, default)
        name = inner.strip().lstrip(".")
        dots = len(inner.strip()) - len(name)
        start = path[: max(len(path) - dots, 0)] if dots else ()
        return self._target((*start, *re.findall(r"[^.\[\]]+", name)), inner.strip(), chain)

    def _target(self, target: KeyPath, name: str, chain: tuple[KeyPath, ...]) -> Any:
        value: Any = self._data
        here: KeyPath = ()
        resolved = False
        for part in target:
            try:
                key = int(part) if isinstance(value, list) else part
                value, here = value[key], (*here, key)
            except (KeyError, IndexError, ValueError, TypeError):
                names = [".".join(map(str, path)) for path, _ in walk(self._root) if path]
                found = closest(".".join(map(str, target)), names)
                hint = f"did you mean `{found}`?" if found else ""
                message = f"`${{{name}}}` refers to nothing in this recipe"
                raise _UnresolvedError(message, hint) from None
            if not resolved and _interpolated(value):
                value, resolved = self.value(value, here, chain), True
        return value if resolved else self._all(value, here, chain)

    def _all(self, value: Any, path: KeyPath, chain: tuple[KeyPath, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._all(child, (*path, key), chain) for key, child in value.items()}
        if isinstance(value, list):
            return [self._all(child, (*path, i), chain) for i, child in enumerate(value)]
        return self.value(value, path, chain) if _interpolated(value) else value


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Literal text with the inside of the interpolation behind it, which may be empty."""
    done = 0
    for found in _INTERPOLATION.finditer(text):
        slashes, inner = found["slashes"], found["inner"]
        literal = text[done : found.start()] + slashes[len(slashes) // 2 + len(slashes) % 2 :]
        done = found.end()
        if len(slashes) % 2:
            yield literal + found[0][len(slashes) :], ""
        elif inner and inner.strip():
            yield literal, inner
        elif re.match(r"[^{}]*\$\{", text[done:]):
            raise _UnresolvedError("a reference inside of a reference is not allowed")
        else:
            raise _UnresolvedError(f"`{text}` is not a valid interpolation")
    yield text[done:], ""


def _interpolated(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _put(data: Any, path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        data = data[part]
    data[path[-1]] = value
