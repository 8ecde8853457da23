"""Chat templates that a recipe names: of a file, or one of those that come with this package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline import StageError
from pipeline.utils import did_you_mean
from stages.model.files import is_local, local

_FOLDER = Path(__file__).parent / "templates"
_TOKEN = re.compile(r"<[|｜][^\s<>{}]+?[|｜]>|<(?:start|end)_of_turn>")
MARKERS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Beginning and end of what a template marks as the assistant's."""
_LARGEST = 1 << 20
"""Bytes."""


def known_templates() -> list[str]:
    """Return the names of the templates that come with this package."""
    return sorted(file.stem for file in _FOLDER.glob("*.jinja"))


def read_template(given: str) -> str:
    """Return the template of a local file or a known name. Raises StageError if there is none, or
    if it is no template."""
    if not is_local(given):
        if given not in known_templates():
            hint = f"{did_you_mean(given, known_templates())}; a file starts with ./, ../, / or ~"
            raise StageError(f"no chat template is called {given!r}", hint=hint)
        return (_FOLDER / f"{given}.jinja").read_text("utf-8")
    from jinja2 import Environment, TemplateSyntaxError

    file = local(given)
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            raise StageError(f"{file} is not a file of at most {_LARGEST >> 20} MiB")
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise StageError(f"{file} cannot be read: {error}") from error
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(MARKERS.sub("", text))
    except TemplateSyntaxError as error:
        raise StageError(f"{file}:{error.lineno}: no chat template: {error.message}") from error
    except RecursionError as error:
        raise StageError(f"{file}: no chat template: nested too deep") from error
    return text


def unknown_tokens(template: str, tokenizer: Any) -> list[str]:
    """Return what a template writes that looks like a special token and is none of the
    tokenizer's, so that it becomes several tokens."""
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    return sorted(set(_TOKEN.findall(template)) - known)
