"""Interpolations of OmegaConf: `${output_dir}/logs`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stages.importing.report import Report
from stages.importing.rules import refused

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
DEPTH = 10
"""References that may stand behind one another."""


def resolved(content: Mapping[str, Any], report: Report, file: str) -> dict[str, Any]:
    """Return the content with the values that its references name. Keys with references to
    something outside the file are entered as refused, and left out."""

    def block(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in values.items():
            new = each(value, f"{prefix}{key}")
            if isinstance(new, str) and "${" in new:
                why, hint = "refers to something outside the file", "write the value itself"
                report.enter(file, f"{prefix}{key}", value, refused(why, hint))
            else:
                found[key] = new
        return found

    def each(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return block(value, f"{name}.")
        if isinstance(value, list):
            return [each(one, f"{name}[{index}]") for index, one in enumerate(value)]
        return _value(value, content)

    return block(content, "")


def _value(value: Any, content: Mapping[str, Any]) -> Any:
    """Return the value behind references, as far as the content has it."""
    for _ in range(DEPTH):
        if not isinstance(value, str) or not (match := _REFERENCE.search(value)):
            return value
        found = _at(content, match[1])
        if found is None or isinstance(found, Mapping | list):
            return value
        whole = match.span() == (0, len(value))
        value = found if whole else f"{value[: match.start()]}{found}{value[match.end() :]}"
    return value


def _at(content: Any, path: str) -> Any:
    for part in path.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content
