"""Imports: doors that wait for a name, packages that may not be there, and garbage meanwhile."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("pipetrain", "torch", "transformers", "deepspeed", "accelerate", "safetensors", "numpy")
AS_USUAL = gc.get_threshold()
RARELY = (100_000, 50, 100)
"""Thresholds of the garbage collector while libraries are imported: allocations minus deallocations
before the young are collected, and so on. An import of torch and transformers makes four times as
many, and nearly all stay."""


@functools.cache
def names_of(file: str) -> Mapping[str, str]:
    """Name -> module of every import under `if TYPE_CHECKING` in a door's file."""
    tree = ast.parse(Path(file).read_text("utf-8"))
    blocks = (node.body for node in tree.body if isinstance(node, ast.If))
    imports = (node for body in blocks for node in body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a door, given its `__name__` and `__file__`.

    A door is a package whose names are imported from their modules when they are first asked for.
    It lists them once, as imports under `if TYPE_CHECKING`, which type checkers and editors read
    (`name as name` re-exports a name); at run time they are resolved one by one (PEP 562), so
    importing the door imports nothing. `__all__` is resolved like a name."""

    def found(name: str) -> Any:
        if name == "__all__":
            return sorted(names_of(file))
        homes = {} if name.startswith("__") else names_of(file)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        return getattr(home, name, None) or importlib.import_module(f"{homes[name]}.{name}")

    return found, lambda: sorted(names_of(file))


@contextlib.contextmanager
def optional(needed: str, *, hint: str) -> Iterator[None]:
    """Import a package in the body, silently. Raises StageError(needed) when that fails."""
    try:
        with unheard():
            yield
    except ImportError as error:
        from pipeline.errors import StageError  # not above: a door imports nothing

        raise StageError(needed, hint=hint) from error


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Suppress the warnings that packages log while they are imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Installed package -> its version."""
    from importlib import metadata

    found = {}
    for package in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def gc_as_usual(*, freeze: bool = False) -> None:
    """Collect garbage as before RARELY. With `freeze` collections pass over what is there already,
    until `gc.unfreeze`."""
    if freeze:
        gc.freeze()
    gc.set_threshold(*AS_USUAL)
