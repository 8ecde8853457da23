"""Names of a package that are imported from its modules when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, sources: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`. `sources` maps a module below `package` to the names, separated by
    blanks, that are taken from it."""
    homes = {name: module for module, names in sources.items() for name in names.split()}

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return found
