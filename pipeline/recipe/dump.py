"""Write values as YAML that this package reads back as the same values: a whole recipe, or one
value in its text, with comments and layout kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import Location
from pipeline.recipe.interpolation import resolve
from pipeline.recipe.nodes import KeyPath, Node, plain, put
from pipeline.recipe.parse import FLOAT, parse
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
    """Block style down to lists and scalars, which take one line each. `note` returns the text of a
    trailing comment for a value's path, or nothing; comments line up in a column."""
    lines = list(_block(data, ())) or [("{}", None)]
    width = min(60, max(len(line) for line, _ in lines))
    notes = ("" if note is None or path is None else note(path) for _, path in lines)
    return "".join(
        f"{line:<{width}}  # {text}\n" if text else f"{line}\n"
        for (line, _), text in zip(lines, notes, strict=True)
    )


def _block(data: dict[str, Any], path: KeyPath) -> Iterator[tuple[str, KeyPath | None]]:
    for key, value in data.items():
        start = f"{'  ' * len(path)}{inline(key)}:"
        if isinstance(value, dict) and value:
            yield start, None
            yield from _block(value, (*path, key))
        else:
            yield f"{start} {inline(value)}", (*path, key)


def inline(value: Any) -> str:
    """The value as YAML on one line."""
    for allow_unicode in (True, False):
        text: str = yaml.dump(
            value, Dumper=_Dumper, default_flow_style=True, allow_unicode=allow_unicode,
            sort_keys=False, width=10**9,
        )  # fmt: skip
        if not UNSAFE.search(text):
            break
    return text.removesuffix("\n").removesuffix("\n...")


def with_value(text: str, path: KeyPath, value: Any, *, after: str, note: str) -> str | None:
    """The text with a value at `path`: instead of the one that is there, or else as a new entry
    after the key `after` of the same mapping. `note` becomes a comment of a new line. None where
    that would change anything else, as in a layout with anchors, or where the text has neither."""
    root = _read(text)
    mapping = None if root is None else root.find(path[:-1])
    if root is None or mapping is None or not isinstance(mapping.value, dict):
        return None
    try:
        node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:  # two anchors of one name, which recipes may have
        return None
    for part in path[:-1]:
        in_list = isinstance(node, yaml.SequenceNode)
        node = node.value[part] if in_list else _pairs(node)[str(part)][1]
    pairs = _pairs(node)
    if old := pairs.get(str(path[-1])):
        start, end = old[1].start_mark.index, old[1].end_mark.index
        gap = "" if start < end or text[start - 1 : start] == " " else " "
        written = f"{text[:start]}{gap}{inline(value)}{text[end:]}"
    elif after not in pairs:
        return None
    elif node.flow_style:
        key, end = pairs[after][0], pairs[after][1].end_mark.index
        quote = key.style or ""
        own = f'"{value}"' if quote == '"' else inline(value)
        written = f"{text[:end]}, {quote}{path[-1]}{quote}: {own}{text[end:]}"
    else:  # on a new line, after the one in which the other value ends
        newline = "\r\n" if "\r\n" in text else "\n"
        line_end = re.compile(r"\r?\n|\Z").search(text, pairs[after][1].end_mark.index)
        assert line_end is not None
        indent = " " * pairs[after][0].start_mark.column
        entry = f"{indent}{path[-1]}: {inline(value)}  # {note}"
        written = f"{text[: line_end.start()]}{newline}{entry}{newline}{text[line_end.end() :]}"
    expected, found = plain(root), _read(written)
    put(expected, path, value)
    return written if found is not None and plain(found) == expected else None


def reads_back(value: Any) -> bool:
    """Whether a recipe can hold a value: text that begins like a path, has an interpolation or is
    `???` is read as something else."""
    root = _read(inline({"value": value}))
    data, unresolved = (None, []) if root is None else resolve(root)
    return not unresolved and bool(data == {"value": value})


def _read(text: str) -> Node | None:
    """The tree of a recipe's text; None if it cannot be read."""
    root, problems = parse(text, locate=lambda *_: Location(file=""), folder=Path("/"))
    return None if problems else root


def _pairs(node: Any) -> dict[str, tuple[Any, Any]]:
    """Key -> the nodes of the key and of its value, of a mapping."""
    return {key.value: (key, value) for key, value in node.value}
