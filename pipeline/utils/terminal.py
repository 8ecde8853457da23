"""Text for people that cannot command their terminal and shows no environment variable's value.

All that a process writes to its standard output and error goes through a `Guarded` stream.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from typing import Any, TextIO
from urllib.parse import quote

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tabs and line breaks
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # writing direction
    "\u2028\u2029\ud800-\udfff\U000e0000-\U000e007f]"  # line breaks, half pairs, invisible letters
)
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_NO_SECRET = re.compile(r"\d{1,7}|.{0,4}|[a-z]{5,7}", re.DOTALL)
"""Values that stay: short numbers, and words, which would hide half of what is said and break JSON
(`false`, `train`)."""

_SECRET_NAME = re.compile(
    "TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|CONNECTION_?STRING|"
    "(?:API|ACCESS|PRIVATE|ACCOUNT)_?KEY|_KEY$",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^/@\s\"']+@")
"""User name and password in an address."""
_SIGNED = re.compile(
    r"([?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|sig|signature|token|"
    r"access_token|api_key|key)=)[^&\s\"']+",
    re.IGNORECASE,
)
"""Signatures and keys among an address's parameters."""

_hidden: dict[str, str] = {}


def hide(value: str, name: str) -> None:
    """Show `name` instead of `value`, as it is, in JSON and in an address, from now on in this
    process."""
    if not _NO_SECRET.fullmatch(value):
        for form in (value, json.dumps(value)[1:-1], quote(value, safe="", errors="replace")):
            _hidden[form] = name


def hide_secrets() -> None:
    """Hide the values of environment variables whose names say that they are secret."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and not _is_file_name(value):
            hide(value, f"${name}")


def _is_file_name(value: str) -> bool:
    # pathlib raises for a name that is too long, and for a user who has no home
    return os.path.exists(os.path.expanduser(value))  # noqa: PTH110, PTH111


def shown(text: str) -> str:
    """`text` as people may see it: colours are dropped, other commands are spelled out."""
    unsafe = UNSAFE.search(text) is not None
    text = _COLOUR.sub("", text) if unsafe else text  # first, since a secret may be coloured
    for value in sorted(_hidden, key=len, reverse=True):
        text = text.replace(value, _hidden[value])
    text = _USERINFO.sub("***@", text) if "@" in text else text
    text = _SIGNED.sub(r"\1***", text) if "=" in text else text
    return UNSAFE.sub(_spelled, text) if unsafe else text


def hidden_in(text: str) -> list[str]:
    """Names of the variables whose values the text holds."""
    return sorted({name for value, name in _hidden.items() if value in text})


def _spelled(match: re.Match[str]) -> str:
    """The value as JSON and YAML write it, so that JSON stays JSON."""
    code = ord(match[0])
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


class Guarded:
    """A text stream that writes what may be shown. The carriage return that a progress bar begins
    with is let through."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """All of it."""
        bare = text.removeprefix("\r")
        self.stream.write(text[: len(text) - len(bare)] + shown(bare))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Line by line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def guard() -> None:
    """Put this process's standard output and error behind a `Guarded` stream, once, and hide the
    environment's secrets."""
    hide_secrets()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))


def bare(stream: TextIO) -> TextIO:
    """The stream itself, for our own colours and bars of text that is `shown` already."""
    return stream.stream if isinstance(stream, Guarded) else stream


class ShownFormatter(logging.Formatter):
    """Records as people may see them."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))
