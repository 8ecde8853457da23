"""Configuration files: YAML or JSON, plain values only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import Location, RecipeError, UsageError
from pipeline.importing.translator import ConfigFile
from pipeline.recipe.nodes import plain
from pipeline.recipe.parse import parse

MAX_BYTES = 1_000_000


def read_config(path: Path) -> ConfigFile:
    """Return the file's content. Raises UsageError for a file that cannot be read, RecipeError for
    mistakes in YAML."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: byte 0x{data[error.start]:02x}") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES} bytes")
    value = _from_json(text, path) if path.suffix == ".json" else _from_yaml(text, path)
    if not isinstance(value, dict):
        raise UsageError(f"{path}: is no mapping of keys to values")
    return ConfigFile(path=path, content=value)


def _from_json(text: str, path: Path) -> Any:
    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UsageError(f"{path}: `{key}` is given twice")
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error


def _from_yaml(text: str, path: Path) -> Any:
    root, problems = parse(
        text,
        locate=lambda line, column: Location(file=str(path), line=line + 1, column=column + 1),
        folder=Path.cwd(),  # as in the tools that read these files
    )
    if problems:
        raise RecipeError(problems)
    return None if root is None else plain(root)
