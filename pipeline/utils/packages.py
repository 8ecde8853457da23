"""Packages that need not be installed, and the versions of installed ones."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Iterable, Iterator

from pipeline.errors import StageError


@contextlib.contextmanager
def optional(needed: str, *, hint: str) -> Iterator[None]:
    """Import a package in the body, silently. Raises StageError with the message `needed` when it
    cannot be imported."""
    try:
        with unheard():
            yield
    except ImportError as error:
        raise StageError(needed, hint=hint) from error


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Suppress the warnings that packages log while they are imported, as of kernels for other
    machines."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


PACKAGES = ("pipetrain", "torch", "transformers", "deepspeed", "accelerate", "safetensors", "numpy")


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Installed package -> its version."""
    found = {}
    for package in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
