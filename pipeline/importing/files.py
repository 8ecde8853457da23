"""Configuration files: YAML or JSON, plain values only."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import Location, RecipeError, UsageError
from pipeline.importing.translator import ConfigFile
from pipeline.recipe.nodes import plain
from pipeline.recipe.parse import parse
from pipeline.utils.foreign import read_whole


def read_config(path: Path) -> ConfigFile:
    """Return the file's content. Raises UsageError, and RecipeError for mistakes in YAML."""
    if path.suffix in (".py", ".sh", ".ipynb"):
        hint = (
            "write its arguments as YAML, one a line as in `learning_rate: 2.0e-5`, and import that"
        )
        raise UsageError(f"{path} is a script, not a file of settings", hint=hint)
    try:
        text = read_whole(path).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text: {error.reason}") from error
    if path.suffix == ".json":
        value = _from_json(text, path)
    else:
        root, problems = parse(
            text,
            locate=lambda line, column: Location(file=str(path), line=line + 1, column=column + 1),
            folder=Path.cwd(),  # as in the tools that read these files
        )
        if problems:
            raise RecipeError(problems)
        value = None if root is None else plain(root)
    if not isinstance(value, dict):
        raise UsageError(f"{path}: does not map keys to values")
    return ConfigFile(path=path, content=value)


def _from_json(text: str, path: Path) -> Any:
    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        for (key, _), (following, _) in itertools.pairwise(sorted(pairs, key=lambda pair: pair[0])):
            if key == following:
                raise UsageError(f"{path}: `{key}` is given twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
