"""What interpolations refer to and call, told before any is resolved.

Also how much work they are: `a: ${b}${b}`, `b: ${c}${c}`, ... doubles with every line, and
OmegaConf would follow all of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.marks import Path

MAX_EXPANSIONS = 1000
"""Interpolations resolved for a whole recipe, each counted as often as it is reached."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One `${name:args}`."""

    name: str
    args: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Text:
    """What a text with interpolations asks for."""

    calls: tuple[Call, ...] = ()
    references: tuple[str, ...] = ()
    """`stages.train.steps` of `${stages.train.steps}`."""
    fault: str = ""
    """Why it cannot be resolved at all."""


def read(text: str) -> Text:
    """Parse, without resolving anything."""
    from omegaconf.errors import GrammarParseError
    from omegaconf.grammar_parser import parse

    try:
        tree = parse(text)
        calls, references = tuple(_calls(tree)), tuple(_references(tree))
    except (GrammarParseError, RecursionError):
        return Text(fault=f"`{text}` is not a valid interpolation")
    if any("${" in reference for reference in references):
        return Text(fault="a reference inside of a reference is not allowed")
    return Text(calls=calls, references=references)


def expansions(references: Mapping[Path, Collection[str]]) -> int:
    """How many interpolations are resolved, from each interpolated value's references; counting
    stops where there are too many to count."""
    if len(references) > MAX_EXPANSIONS:
        return len(references)
    leaves: dict[Path, Path] = {tuple(map(str, path)): path for path in references}
    known: dict[Path, int] = {}

    def cost(leaf: Path) -> int:
        if leaf not in known:
            known[leaf] = 1  # what leads back here is a circle; resolving stops at it
            path = leaves[leaf]
            targets = [_target(reference, path) for reference in references[path]]
            known[leaf] += sum(cost(each) for to in targets for each in leaves if _meet(to, each))
        return known[leaf]

    try:
        return sum(cost(leaf) for leaf in leaves)
    except RecursionError:
        return MAX_EXPANSIONS + 1


def _target(reference: str, path: Path) -> Path:
    """The path that `${reference}`, written at `path`, points to; keys and indexes as text.

    One leading dot is the mapping it stands in, each further dot one level up.
    """
    name = reference.lstrip(".")
    dots = len(reference) - len(name)
    start = path[: max(len(path) - dots, 0)] if dots else ()
    return (*map(str, start), *re.findall(r"[^.\[\]]+", name))


def _meet(one: Path, other: Path) -> bool:
    """Whether one path is the other or lies below it."""
    return all(left == right for left, right in zip(one, other, strict=False))


def _calls(tree: Any) -> Iterator[Call]:
    for found in _find(tree, "InterpolationResolverContext"):
        sequence = found.sequence()
        args = tuple(element.getText() for element in sequence.element()) if sequence else ()
        yield Call(name=found.resolverName().getText(), args=args)


def _references(tree: Any) -> Iterator[str]:
    for found in _find(tree, "InterpolationNodeContext"):
        yield found.getText().removeprefix("${").removesuffix("}").strip()


def _find(tree: Any, kind: str) -> Iterator[Any]:
    if type(tree).__name__ == kind:
        yield tree
    for child in getattr(tree, "children", None) or ():
        yield from _find(child, kind)
