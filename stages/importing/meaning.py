"""The outcome of a single key, for a hint where somebody has written it into a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.importing import ConfigFile, KeyOutcome
from stages.importing.report import Draft, Report
from stages.importing.rules import Table

Company = Mapping[str, Any]
"""Keys without which another one means nothing, such as `use_peft` for `lora_r`."""


def meaning(
    key: str,
    content: Mapping[str, Any],
    table: Table,
    companies: Sequence[Company],
    draft: Callable[[ConfigFile], Draft],
) -> KeyOutcome | None:
    """Return the outcome of a key that the table, or a block in it, has; None if it has none.

    `draft` reads a file. The key is read in each of the companies, next to the other keys of the
    content, until it has a place in the recipe; without them only where it contradicts one.
    """
    last: KeyOutcome | None = None
    others = {name: each for name, each in content.items() if name != key and name in table}
    for beside in (others, {}) if others else ({},):
        for blocks in places(table, key):
            for company in companies:
                file = _file({**company, **beside}, blocks, {key: content[key]})
                found = _outcome(draft(file).report, ".".join((*blocks, key)))
                if found is not None and found.to:
                    return found
                last = found or last
        if last is not None and last.outcome == "default":
            break
    return last


def _file(company: Company, blocks: Sequence[str], content: Company) -> ConfigFile:
    return ConfigFile(path=Path("config.yaml"), content=_among(company, blocks, content))


def _among(company: Company, blocks: Sequence[str], content: Company) -> Company:
    """Return the company, with more keys in a block of it."""
    if not blocks:
        return {**company, **content}
    inner = company.get(blocks[0])
    block = inner if isinstance(inner, Mapping) else {}
    return {**company, blocks[0]: _among(block, blocks[1:], content)}


def places(table: Table, key: str, blocks: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the blocks around a key, for every place where the table has it."""
    if key in table:
        yield blocks
    for block, inner in table.items():
        if isinstance(inner, Mapping):
            yield from places(inner, key, (*blocks, block))


def _outcome(report: Report, key: str) -> KeyOutcome | None:
    return next((one for one in report.outcomes() if one.key == key), None)
