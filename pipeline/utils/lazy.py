"""Doors: packages whose names are imported from their modules when they are first asked for.

A door lists its names once, as imports under `if TYPE_CHECKING`, which type checkers and editors
read (`name as name` re-exports a name); at run time they are resolved one by one (PEP 562), so
importing the door imports nothing.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


@functools.cache
def names_of(file: str) -> Mapping[str, str]:
    """Name -> module of every import under `if TYPE_CHECKING` in a door's file."""
    tree = ast.parse(Path(file).read_text("utf-8"))
    blocks = (node.body for node in tree.body if isinstance(node, ast.If))
    imports = (node for body in blocks for node in body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A door's `__getattr__` and `__dir__`, given its `__name__` and `__file__`. `__all__` is
    resolved like a name."""

    def listed() -> list[str]:
        return sorted(names_of(file))

    def found(name: str) -> Any:
        if name == "__all__":
            return listed()
        homes = {} if name.startswith("__") else names_of(file)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        return getattr(home, name, None) or importlib.import_module(f"{homes[name]}.{name}")

    return found, listed
