"""Mutations of valid files, and what a reader of them must not do."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import signal
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import strategies as st

from pipeline.errors import PipeError

SECONDS = 20
"""Most seconds of the processor that one read takes."""
HANG = 300
"""Most seconds of the clock, which a read that waits for ever reaches."""
MEMORY = 1 << 30
"""Most bytes of address space that a read adds."""
NUMBERS = ("-1", "0", "1", "255", "4294967296", "9223372036854775807", "18446744073709551616",
           "99999999999999999999999", "1e308", "NaN")  # fmt: skip
NAMES = ("../../etc/passwd", "/etc/passwd", "..", ".", "", "a/../../b", "con", "x" * 5000, "\u202e")
CHANGES = ("byte", "cut", "leave out", "insert", "repeat", "number", "name")


class Changes:
    """Random changes of bytes, drawn by Hypothesis."""

    def __init__(self, data: Any) -> None:
        self._draw = data.draw

    def place(self, size: int) -> int:
        return int(self._draw(st.integers(0, max(size - 1, 0))))

    def __call__(self, content: bytes) -> bytes:
        """Return the content with one to three changes."""
        for _ in range(self._draw(st.integers(1, 3))):
            content = self._changed(content, self._draw(st.sampled_from(CHANGES)))
        return content

    def _changed(self, content: bytes, change: str) -> bytes:
        draw = self._draw
        if change in ("number", "name"):
            pattern = rb"\d+" if change == "number" else rb"[A-Za-z_][\w./-]+"
            text = draw(st.sampled_from(NUMBERS if change == "number" else NAMES))
            if not (found := list(re.finditer(pattern, content[:20_000]))):
                return content
            match = found[self.place(len(found))]
            return content[: match.start()] + text.encode() + content[match.end() :]
        at = self.place(len(content))
        before, after = content[:at], content[at:]
        match change:
            case "byte":
                return before + bytes([draw(st.integers(0, 255))]) + after[1:]
            case "leave out":
                return before + after[draw(st.integers(1, 40)) :]
            case "insert":
                return before + draw(st.binary(max_size=20)) + after
            case "repeat":
                return before + after[: draw(st.integers(1, 60))] + after
        return before


def changed_archive(content: bytes, changes: Changes) -> bytes:
    """Return a zip archive with one member changed and its checksum right, as torch.save's files
    are; other content is changed as it is."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return changes(content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    chosen = sorted(members)[changes.place(len(members))]
    members[chosen] = changes(members[chosen])
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return made.getvalue()


_opened: list[str] = []
_watching = False


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event == "open" and isinstance(arguments[0], str | os.PathLike):
        _opened.append(os.path.realpath(arguments[0]))


sys.addaudithook(_hear)
_REPOSITORY = str(Path(__file__).parents[2])
_ALLOWED = ("/usr/", "/proc/", "/sys/", "/dev/", _REPOSITORY, sys.prefix, sys.base_prefix)


@contextlib.contextmanager
def bounded(folder: Path, *, may_leave: bool = False) -> Iterator[None]:
    """Read hostile files in `folder` in the body: it raises only errors for people, ends in time,
    takes little memory, and opens nothing elsewhere unless it `may_leave`."""
    global _watching
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {
        signal.SIGPROF: (signal.ITIMER_PROF, SECONDS),
        signal.SIGALRM: (signal.ITIMER_REAL, HANG),
    }
    before = {number: signal.signal(number, _too_long) for number in limits}
    _opened.clear()
    _watching = True
    for timer, seconds in limits.values():
        signal.setitimer(timer, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        with contextlib.suppress(PipeError):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, (timer, _) in limits.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
        _watching = False
    inside = (str(folder.resolve()), *_ALLOWED, *filter(None, sys.path))
    elsewhere = [place for place in _opened if not place.startswith(inside)]
    assert may_leave or elsewhere == []


def _too_long(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    raise AssertionError(f"more than {SECONDS} s of the processor, or {HANG} s ({name})")
