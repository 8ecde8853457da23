"""The events of a run, one JSON object a line, from which a later process continues it.

Each line ends with a checksum of the whole file up to there, so that any change of the file is an
error. Lines of earlier versions have no checksum. Addresses inside the run's folder are written
relative to it: a run that is moved or copied finds its own results.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xxhash import xxh3_64, xxh3_64_hexdigest

from pipeline.errors import JournalDamaged, in_words
from pipeline.execution.run_state import RunState
from pipeline.recipe.nodes import mapped
from pipeline.utils.files import naming, opened
from pipeline.utils.foreign import is_number, read_whole
from pipeline.utils.terminal import shown
from pipeline.utils.text import plural

MOST = 1 << 28
"""Most bytes of a journal, which has a few lines a start."""
IN_RUN = "in run"
"""Key of an object that stands for a path inside the run's folder, and has no other key."""
OPTIONAL: Mapping[str, Any] = {
    "slot": str, "seconds": (int, float), "procs": int, "device": str, "problem": str,
    "environment": dict, "hub": list, "changed": bool, "undone": bool,
}  # fmt: skip
"""Keys that not every event has -> their kind."""
_SUM = re.compile(rb', "xxh3": "([0-9a-f]{16})"\}')
_SUM_BYTES = len(b', "xxh3": "0123456789abcdef"}')


class Journal:
    """Append-only. Whoever holds the run's lock writes, and rank 0 while the ranks run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = path.parent.absolute()
        self._lock = threading.Lock()
        """Warnings come from any thread."""

    def write(self, event: str, **facts: Any) -> None:
        """Append an event and force it to disk. A line that a crash cut short is removed first.
        Raises OSError, which names the file."""
        facts = {"time": time.time(), "event": event, **facts}
        record = mapped(facts, lambda value: _relative(value, str(self._folder)))
        body = json.dumps(record, allow_nan=False).encode().removesuffix(b"}")
        with self._lock, naming(self.path), opened(self.path, "ab+") as file:
            file.seek(0)
            content = file.read()
            before = _whole_lines(content)
            file.truncate(min(len(before), len(content)))
            checksum = xxh3_64_hexdigest(before + body)
            file.write(before[len(content) :] + body + f', "xxh3": "{checksum}"}}\n'.encode())
            file.flush()
            os.fsync(file.fileno())

    def events(self) -> list[dict[str, Any]]:
        """Events in order, without a last line that a crash cut short. Raises JournalDamaged."""
        return list(self._read())

    def state(self) -> RunState:
        """What the events come to. Raises JournalDamaged."""
        return RunState.of(self._read())

    def newest_command(self) -> list[dict[str, Any]]:
        """Events of the newest `pipe run` or `pipe resume`, its restarts too, whether or not it was
        undone. Raises JournalDamaged."""
        events = self.events()
        return events[command_begins(events) :]

    def _read(self) -> Iterator[dict[str, Any]]:
        content = self._content()
        lines = _whole_lines(content).split(b"\n")[:-1]
        digest, good, summed = xxh3_64(), 0, False
        for number, line in enumerate(lines, start=1):
            found = _SUM.fullmatch(line, max(0, len(line) - _SUM_BYTES))
            if found:
                digest.update(line[: found.start()])
                if digest.hexdigest().encode() != found[1]:
                    raise self._damaged(good + 1, number)
                digest.update(line[found.start() :] + b"\n")
                good, summed = number, True
            elif summed:
                raise self._damaged(number, number)
            else:
                digest.update(line + b"\n")
            event = _parsed(line, self._folder)
            if event is None and number < len(lines):
                continue  # earlier versions left what a crash had cut short, and went on behind it
            if event is None or not is_event(event):
                raise self._damaged(number, number)
            yield event

    def _content(self) -> bytes:
        try:
            if not self.path.exists():
                return b""
            return read_whole(self.path, most=MOST, within=self._folder)
        except PermissionError:
            raise
        except OSError as error:
            hint = "bring the journal that the run has written"
            raise JournalDamaged(in_words(error), hint=hint) from error

    def _damaged(self, first: int, last: int) -> JournalDamaged:
        where = f"line {first}" if first == last else f"one of lines {first} to {last}"
        file, whole = shlex.quote(str(self.path)), shlex.quote(f"{self.path}.whole")
        return JournalDamaged(
            f"{self.path}: {where} is not as it was written",
            hint=f"to continue from the lines before it: head -n {first - 1} {file} > {whole} && "
            f"mv {whole} {file}; what finished later runs again, training from its newest "
            "checkpoint",
        )


def command_begins(events: Sequence[Mapping[str, Any]]) -> int:
    """Return the index at which the newest command begins: with the slots that it set aside, or
    with its first start. 0 without one."""
    begin = max(
        (
            at for at, event in enumerate(events)
            if event["event"] == "run started" and not event.get("restart")
        ),
        default=0,
    )  # fmt: skip
    while begin and events[begin - 1]["event"] == "slot set aside":
        begin -= 1
    return begin


def _whole_lines(content: bytes) -> bytes:
    """Complete lines of the file. An incomplete last line, cut short by a crash, is dropped; one
    that lacks only its newline is kept. A line with a checksum in its middle is damaged, not
    incomplete, and stays."""
    head, end, tail = content.rpartition(b"\n")
    if tail and (_SUM.search(tail) or _parsed(tail, Path()) is not None):
        return content + b"\n"
    return head + end


def _parsed(line: bytes, folder: Path) -> dict[str, Any] | None:
    def absolute(value: dict[str, Any]) -> Any:
        return str(folder / str(value[IN_RUN])) if value.keys() == {IN_RUN} else value

    try:
        record = json.loads(line, object_hook=absolute)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return None
    return record if isinstance(record, dict) else None


def is_event(record: Mapping[str, Any]) -> bool:
    """Whether it has the keys that its readers use, and those are of the right kind."""
    kinds: dict[str, Any] = {"time": (int, float), "event": str}
    kinds |= {key: kind for key, kind in OPTIONAL.items() if record.get(key) is not None}
    if record.get("event") in ("slot started", "slot finished", "slot set aside"):
        kinds["slot"] = str
    if record.get("event") == "slot finished":
        kinds |= {"digest": str, "record": (dict, type(None))}
    fit = all(key in record and isinstance(record[key], kind) for key, kind in kinds.items())
    return fit and is_number(record["time"]) and is_number(record.get("seconds") or 0)


def _relative(value: Any, folder: str) -> Any:
    """A value of JSON, a path inside the folder written relative to it. A text that begins like one
    is a path if something is there: a sentence may begin with a path, too."""
    if isinstance(value, str) and (value == folder or value.startswith(f"{folder}/")):
        with contextlib.suppress(ValueError):  # a null character
            return {IN_RUN: value[len(folder) + 1 :]} if os.path.lexists(value) else value
    return value


MOST_WARNINGS = 100
"""Warnings of one start that are journalled, each text once; the log has all. How many more there
were is journalled at the end."""
LONGEST_WARNING = 4000
"""Characters of a warning that are journalled."""


@contextlib.contextmanager
def warnings_in(journal: Journal, log: logging.Logger) -> Iterator[None]:
    """Journal what is logged as a warning within the body."""
    handler = _Warnings(journal)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        if handler.left_out:
            more = plural(handler.left_out, "more warning")
            handler.record(f"the log has {more} of this start")


class _Warnings(logging.Handler):
    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal
        self._told = set[str]()
        self.left_out = 0
        """Warnings that came after as many as are journalled."""

    def emit(self, record: logging.LogRecord) -> None:
        text = shown(record.getMessage())[:LONGEST_WARNING]
        if record.levelno != logging.WARNING or text in self._told:
            return
        if len(self._told) == MOST_WARNINGS:
            self.left_out += 1
            return
        self._told.add(text)
        self.record(text)

    def record(self, text: str) -> None:
        """Journal a text."""
        with contextlib.suppress(OSError):  # the log has it too
            self._journal.write("warning", text=text)
