"""PyYAML's errors, which name its own states -> what is wrong with the line, and what to write.

PyYAML notices many mistakes lines after they were made. The place that is reported is the place to
change: where a quote or bracket opens, the line whose colon is missing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import yaml

BLANKS = {"\t": "a tab", "\u00a0": "a no-break space"}
CLOSING = {"[": "]", "{": "}"}
BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
COMMENT = re.compile(r"\s*(#|//|/\*)")
KEY = re.compile(r"(?P<indent>\s*(?:- )?)(?P<key>[\w.-]+)\s*(?P<mark>:(?=\S)|=)\s*(?P<value>.*)")


class Mistake(NamedTuple):
    """A mistake in a text; line and column count from zero."""

    line: int
    column: int
    message: str
    hint: str = ""


def explain(error: yaml.MarkedYAMLError, text: str) -> Mistake:
    """Return the mistake in `text` that PyYAML has reported as `error`."""
    lines = BREAK.split(text.replace("\ufeff", ""))  # as PyYAML counts lines and columns
    at = error.problem_mark or error.context_mark
    line, column = (at.line, at.column) if at is not None else (0, 0)
    what = " ".join((error.problem or "cannot be read").split())
    context = f" {error.context}" if error.context else ""
    return (
        _wrong_blank(lines, line)
        or _opened(error, lines)
        or _colon(error, what, lines, line)
        or _first_character(what, lines, line, column)
        or _indentation(error, what, lines, line)
        or Mistake(line, column, f"not valid YAML: {what}{context}")
    )


def _wrong_blank(lines: Sequence[str], line: int) -> Mistake | None:
    """A tab or a no-break space in the indentation of the line, or of the one before it."""
    for number in (line, line - 1):
        blanks = lines[number][: _indent(lines[number])] if 0 <= number < len(lines) else ""
        for character, name in BLANKS.items():
            if character in blanks:
                column = blanks.index(character)
                return Mistake(number, column, f"{name} cannot be used here", "use spaces")
    return None


def _opened(error: yaml.MarkedYAMLError, lines: Sequence[str]) -> Mistake | None:
    """A quote, bracket or brace that is not closed where it should be."""
    start, at, context = error.context_mark, error.problem_mark, error.context or ""
    opening = "" if start is None else lines[start.line][start.column : start.column + 1]
    if start is None or not opening:
        return None
    quoted, closing = "quoted scalar" in context, CLOSING.get(opening)
    if not quoted and (closing is None or not re.search("flow (sequence|mapping)", context)):
        return None
    same_line = at is not None and at.line == start.line
    if at is not None and not quoted and same_line and at.column < len(lines[at.line].rstrip()):
        message = f"a comma is missing before this, or {closing} for the {opening} before it"
        return Mistake(at.line, at.column, message)
    what = f"the quote {opening}" if quoted else f"the {opening}"
    message = f"{what} that opens here is not closed"
    return Mistake(start.line, start.column, message, f"add {opening if quoted else closing}")


def _colon(
    error: yaml.MarkedYAMLError, what: str, lines: Sequence[str], line: int
) -> Mistake | None:
    """A colon that is missing, has no blank after it, or is one too many."""
    if "could not find expected ':'" in what and error.context_mark is not None:
        return _no_colon(lines, error.context_mark.line)
    if not what.startswith("mapping values are not allowed"):
        return None
    before, depth = _before(lines, line), _indent(lines[line])
    if before is not None and depth > _indent(lines[before]):
        message = f"indented deeper than line {before + 1}, which has a value already"
        hint = f"indent it by {_indent(lines[before])} spaces"
        above = _before(lines, before)
        if above is not None and _indent(lines[above]) == depth:
            line, hint = before, f"indent it by {depth} spaces"
            message = "indented less than the lines above and below, and it has a value"
        return _no_key(lines, before) or Mistake(line, _indent(lines[line]), message, hint)
    if before is not None and not _has_key(lines[before]):
        return _no_key(lines, before) or _no_colon(lines, before)
    key, _, value = lines[line].partition(":")
    value = value.strip()
    hint = f'put quotes around it: `{key.strip()}: "{value}"`'
    return Mistake(line, lines[line].index(value, len(key)), "text with a colon in it", hint)


def _no_key(lines: Sequence[str], line: int) -> Mistake | None:
    """`key:value` and `key = value`."""
    found = KEY.fullmatch(lines[line].rstrip())
    if found is None:
        return None
    message = "a space is missing after the colon"
    if found["mark"] == "=":
        message = "a key is followed by a colon, not by ="
    hint = f"write `{found['key']}: {found['value']}`"
    return Mistake(line, found.start("key"), message, hint)


def _no_colon(lines: Sequence[str], line: int) -> Mistake:
    words = lines[line].strip() if line < len(lines) else ""
    column = _indent(lines[line]) if words else 0
    first, _, value = words.partition(" ")
    hint = f"write `{first}:{f' {value}' if value else ''}`"
    other = Mistake(line, column, "a colon is missing here", hint)
    if COMMENT.match(words):
        other = Mistake(line, column, "a comment begins with #")
    return _no_key(lines, line) or other


def _first_character(what: str, lines: Sequence[str], line: int, column: int) -> Mistake | None:
    """A value that begins with a character that means something in YAML."""
    if "cannot start any token" not in what and "alphabetic or numeric" not in what:
        return None
    start = column if "cannot start" in what else column - 1
    value = lines[line][start:].strip()
    message = f"text that begins with {value[:1]} needs quotes"
    return Mistake(line, start, message, f'write "{value}"')


def _indentation(
    error: yaml.MarkedYAMLError, what: str, lines: Sequence[str], line: int
) -> Mistake | None:
    """A line that fits no line above it."""
    if "<block end>" not in what or error.context_mark is None or line >= len(lines):
        return None
    column = _indent(lines[line])
    if lines[line].lstrip().startswith("- "):
        hint = "give the list a key, or remove the dash"
        return Mistake(line, column, "a list's entry among keys", hint)
    depths = {_indent(lines[n]) for n in range(line) if _has_key(lines[n])}
    nearest = min(depths, key=lambda depth: (abs(depth - column), -depth), default=0)
    hint = f"indent it by {nearest} spaces"
    return Mistake(line, column, "its indentation matches no line above", hint)


def _before(lines: Sequence[str], line: int) -> int | None:
    """The line before it that is neither empty nor a comment."""
    numbers = range(min(line, len(lines)) - 1, -1, -1)
    return next((n for n in numbers if lines[n].strip() and lines[n].strip()[0] != "#"), None)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _has_key(line: str) -> bool:
    return re.match(r"\s*(- )?[^\s#][^:]*:(\s|$)", line) is not None
