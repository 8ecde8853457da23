"""Words of a command line that are no `path=value`, but were meant as one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

PATH = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
LIKE_ONE = re.compile(
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
    if _is_override(word):
        # the shell may have cut the value at its blanks
        for count in range(len(after) + 1):
            if count and _is_override(after[count - 1]):
                return None
            whole = " ".join([word, *after[:count]])
            if _is_yaml(whole.partition("=")[2]):
                return Meant(override=f"'{whole}', in quotes", words=count) if count else None
        return None
    found = LIKE_ONE.fullmatch(word)
    path = found["path"].replace("/", ".") if found else ""
    if found and found["mark"] and found["value"]:
        return Meant(override=f"{path}={found['value']}")
    if "=" in word.strip("= "):
        return None
    if found is None:
        return Meant()
    used = 1 if after[:1] in (["="], [":"]) else 0
    value = after[used] if len(after) > used and not found["value"] else ""
    if not value or ("=" in value and not used):
        return Meant()
    return Meant(override=f"{path}={value.removeprefix('=')}", words=used + 1)


def _is_override(word: str) -> bool:
    path, equals, _ = word.partition("=")
    return bool(equals and PATH.fullmatch(path))


def _is_yaml(text: str) -> bool:
    try:
        return all(True for _ in yaml.parse(text, yaml.SafeLoader))
    except yaml.YAMLError:
        return False
