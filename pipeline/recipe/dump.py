"""Write values as YAML that this package reads back as the same values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from pipeline.recipe.nodes import KeyPath
from pipeline.recipe.scalars import FLOAT
from pipeline.utils.terminal import UNSAFE


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1, 1.2 or our reader could take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    lines = re.search(r"[\n\r\x85\u2028\u2029]", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if lines else None)


_Dumper.add_representer(str, _text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^None$"), ["N"])  # refused
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(f"^(?:{FLOAT.pattern})$"), list("-+0123456789.")
)


def render(data: dict[str, Any], note: Callable[[KeyPath], str] | None = None) -> str:
    """Block style down to lists and scalars, which take one line each.

    `note` gives the text of a trailing comment for a value's path, or nothing; comments line up in
    a column.
    """
    lines = list(_block(data, (), ""))
    if note is None:
        return "".join(f"{line}\n" for line, _ in lines)
    width = min(60, max((len(line) for line, _ in lines), default=0))
    notes = ("" if path is None else note(path) for _, path in lines)
    return "".join(
        f"{line:<{width}}  # {text}\n" if text else f"{line}\n"
        for (line, _), text in zip(lines, notes, strict=True)
    )


def _block(
    data: dict[str, Any], path: KeyPath, indent: str
) -> Iterator[tuple[str, KeyPath | None]]:
    if not data and not path:
        yield "{}", None
    for key, value in data.items():
        below = (*path, key)
        if isinstance(value, dict) and value:
            yield f"{indent}{inline(key)}:", None
            yield from _block(value, below, indent + "  ")
        else:
            yield f"{indent}{inline(key)}: {inline(value)}", below


def inline(value: Any) -> str:
    """The value as YAML on one line."""
    for allow_unicode in (True, False):
        text: str = yaml.dump(
            value,
            Dumper=_Dumper,
            default_flow_style=True,
            allow_unicode=allow_unicode,
            sort_keys=False,
            width=10**9,
        )
        if not UNSAFE.search(text):
            break
    return text.removesuffix("\n").removesuffix("\n...")
