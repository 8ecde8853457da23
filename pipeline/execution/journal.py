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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64, xxh3_64_hexdigest

from pipeline.errors import JournalDamaged, in_words
from pipeline.execution.run_state import RunState
from pipeline.utils.files import naming, opened
from pipeline.utils.foreign import is_number, read_whole
from pipeline.utils.terminal import shown
from pipeline.utils.text import plural

MOST = 1 << 28
"""Most bytes of a journal, which has a few lines a start."""
IN_RUN = "in run"
"""Key of an object that stands for a path inside the run's folder, and has no other key."""
SLOT = {"slot": str}
REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "slot started": SLOT,
    "slot finished": {**SLOT, "digest": str, "record": (dict, type(None))},
    "slot set aside": SLOT,
}
"""Event -> keys that it has in addition to `time` and `event`, and their kinds."""
OPTIONAL: Mapping[str, Any] = {
    "slot": str, "seconds": (int, float), "procs": int, "device": str, "problem": str,
    "environment": dict, "hub": list, "changed": bool, "undone": bool,
}  # fmt: skip
"""Keys that not every event has -> their kind."""
_SUM = re.compile(rb', "xxh3": "([0-9a-f]{16})"\}')
_SUM_BYTES = len(b', "xxh3": "0123456789abcdef"}')
MOST_WARNINGS = 100
"""Warnings of one start that are journalled, each text once; the log has all. How many more there
were is journalled at the end."""
LONGEST_WARNING = 4000
"""Characters of a warning that are journalled."""


@dataclass(frozen=True, eq=False)
class Journal:
    """Append-only. Whoever holds the run's lock writes, and rank 0 while the ranks run."""

    path: Path
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    """Warnings come from any thread."""

    def write(self, event: str, **facts: Any) -> None:
        """Append an event and force it to disk. A line that a crash cut short is removed first.
        Raises OSError, which names the file."""
        record = self._relative({"time": time.time(), "event": event, **facts})
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
        try:
            there = self.path.exists()
            folder = self.path.parent
            content = read_whole(self.path, most=MOST, within=folder) if there else b""
        except PermissionError:
            raise
        except OSError as error:
            hint = "bring the journal that the run has written"
            raise JournalDamaged(in_words(error), hint=hint) from error
        lines = _whole_lines(content).split(b"\n")[:-1]
        digest, good, events = xxh3_64(), 0, list[dict[str, Any]]()
        for number, line in enumerate(lines, start=1):
            found = _SUM.fullmatch(line, max(0, len(line) - _SUM_BYTES))
            body = line[: found.start()] if found else line
            digest.update(body)
            if found and digest.hexdigest().encode() != found[1]:
                raise self._damaged(good + 1, number)
            if good and not found:
                raise self._damaged(number, number)
            digest.update(line[len(body) :] + b"\n")
            good = number if found else 0
            event = _parsed(line, folder.absolute())
            if event is None and number < len(lines):
                continue  # earlier versions left what a crash had cut short, and wrote on after it
            if event is None or not is_event(event):
                raise self._damaged(number, number)
            events.append(event)
        return events

    def state(self) -> RunState:
        """The state of the run after all events. Raises JournalDamaged."""
        return RunState.of(self.events())

    def _relative(self, value: Any) -> Any:
        """A value of JSON, a path inside the folder written relative to it. A text that begins like
        one is a path if something is there: a sentence may begin with a path, too."""
        if isinstance(value, Mapping):
            return {key: self._relative(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._relative(inner) for inner in value]
        folder = str(self.path.parent.absolute())
        if isinstance(value, str) and (value == folder or value.startswith(f"{folder}/")):
            with contextlib.suppress(ValueError):  # a null character
                return {IN_RUN: value[len(folder) + 1 :]} if os.path.lexists(value) else value
        return value

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
    """Index at which the newest `pipe run` or `pipe resume` begins, whether or not it was undone:
    with the slots that it set aside, or with its first start. 0 without one."""
    begin = len(events) - 1
    while begin > 0 and (events[begin]["event"] != "run started" or events[begin].get("restart")):
        begin -= 1
    while begin > 0 and events[begin - 1]["event"] == "slot set aside":
        begin -= 1
    return max(begin, 0)


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
    kinds = {key: kind for key, kind in OPTIONAL.items() if record.get(key) is not None}
    name = record.get("event")
    kinds |= {"time": (int, float), "event": str, **REQUIRED.get(str(name), {})}
    fit = all(key in record and isinstance(record[key], kind) for key, kind in kinds.items())
    return fit and is_number(record["time"]) and is_number(record.get("seconds") or 0)


@contextlib.contextmanager
def warnings_in(journal: Journal, log: logging.Logger) -> Iterator[None]:
    """Journal what is logged as a warning within the body."""
    handler = _Warnings(logging.WARNING)
    handler.journal, handler.texts = journal, set()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        if handler.left_out:
            more = plural(handler.left_out, "more warning")
            with contextlib.suppress(OSError):
                journal.write("warning", text=f"the log has {more} of this start")


class _Warnings(logging.Handler):
    journal: Journal
    texts: set[str]
    left_out = 0
    """Warnings after MOST_WARNINGS."""

    def emit(self, record: logging.LogRecord) -> None:
        text = shown(record.getMessage())[:LONGEST_WARNING]
        if record.levelno != logging.WARNING or text in self.texts:
            return
        if len(self.texts) == MOST_WARNINGS:
            self.left_out += 1
            return
        self.texts.add(text)
        with contextlib.suppress(OSError):  # the log has it too
            self.journal.write("warning", text=text)
