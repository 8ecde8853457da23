"""Warnings of a run in its journal, from which reports show them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from pipeline.execution.journal import Journal
from pipeline.utils.terminal import shown
from pipeline.utils.text import plural

MOST = 100
"""Warnings of one start that are journalled, each text once; the log has all. How many more there
were is journalled at the end."""
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
        if handler.left_out:
            more = plural(handler.left_out, "more warning")
            handler.record(f"the log has {more} of this start")


class _Record(logging.Handler):
    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal
        self._told = set[str]()
        self.left_out = 0
        """Warnings that came after as many as are journalled."""

    def emit(self, record: logging.LogRecord) -> None:
        text = shown(record.getMessage())[:LONGEST]
        if record.levelno != logging.WARNING or text in self._told:
            return
        if len(self._told) == MOST:
            self.left_out += 1
            return
        self._told.add(text)
        self.record(text)

    def record(self, text: str) -> None:
        """Journal a text."""
        with contextlib.suppress(OSError):  # the log has it too
            self._journal.write("warning", text=text)
