"""Words of a command line that are no `path=value`, but were meant as one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PATH = re.compile(
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
    """Return what is meant by a word that is no override, given those after it; None for one."""
    if word.endswith((".yaml", ".yml")) and "=" not in word:
        hint = "a command takes one recipe; name one that it is laid over in its `extends`"
        return Meant(hint=hint)
    open_value = _torn_value(word, after)
    if open_value is not None:
        return open_value
    found = PATH.fullmatch(word)
    path = found["path"].replace("/", ".") if found else ""
    if "=" in word.lstrip("-+~") and found and found["mark"] == "=":
        whole = f"{path}={found['value']}"
        return None if whole == word or not found["value"] else Meant(override=whole)
    if "=" in word.strip("= "):
        return None
    if found is None:
        return Meant()
    if found["value"] and found["mark"]:
        return Meant(override=f"{path}={found['value']}")
    used = 1 if after[:1] in (["="], [":"]) else 0
    value = after[used] if len(after) > used and not found["value"] else ""
    if not value or ("=" in value and not used):
        return Meant()
    return Meant(override=f"{path}={value.removeprefix('=')}", words=used + 1)


def _torn_value(word: str, after: Sequence[str]) -> Meant | None:
    """A list or mapping that the shell has cut at its blanks."""
    path, equals, value = word.partition("=")
    if not equals or value.count("{") + value.count("[") <= value.count("}") + value.count("]"):
        return None
    for count in range(1, len(after) + 1):
        value = " ".join([value, after[count - 1]])
        if value.count("{") + value.count("[") == value.count("}") + value.count("]"):
            return Meant(override=f"'{path}={value}', in quotes", words=count)
    return None
