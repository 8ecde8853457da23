"""Packages that need not be installed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from pipeline.errors import StageError


@contextlib.contextmanager
def optional(needed: str, *, hint: str) -> Iterator[None]:
    """Imports a package inside, unheard. Raises StageError, saying what is `needed`, when it cannot
    be imported."""
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
