"""Warnings of a run in its journal, from which reports show them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from pipeline.execution.journal import Journal
from pipeline.utils.terminal import shown

MOST = 100
"""Warnings of one start that are journalled, each text once; the log has all."""
LONGEST = 4000
"""Characters of a warning that are journalled."""


@contextlib.contextmanager
def warnings_in(journal: Journal, log: logging.Logger) -> Iterator[None]:
    """Journal what is logged as a warning within the body."""
    handler = _Record(journal)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Record(logging.Handler):
    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal
        self._told = set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        text = shown(record.getMessage())[:LONGEST]
        if record.levelno == logging.WARNING and text not in self._told and len(self._told) < MOST:
            self._told.add(text)
            with contextlib.suppress(OSError):  # the log has it too
                self._journal.write("warning", text=text)
