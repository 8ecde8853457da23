"""Files that others may have made: only regular ones, no more bytes than there should be, and no
code, unless the command line has granted that, which a recipe cannot.

A folder that somebody has sent can hold a FIFO or a device instead of a file, which would be read
for ever, a link to any file of ours, and files of any size that take no room on the disk. Files of
one JSON object a line survive a writer that was killed in the middle of a line."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import UsageError
from pipeline.utils.files import naming, opened

WHOLE = 16 << 20
"""Most bytes of a file that is read as a whole, unless its reader says otherwise. JSON takes up to
thirty times as much as objects."""
BLOCK = 1 << 20
LINE = 16 << 20
"""Most bytes of a line."""
NO_FILE = "is a pipe or a device, not a file"
TRUST_PICKLE = "PIPE_TRUST_PICKLE"
"""Environment variable that `--trust-pickle` sets, for the processes of the run too."""
TRUST_CODE = "PIPE_TRUST_REMOTE_CODE"
"""The same for `--trust-remote-code`."""


def open_regular(path: str | Path, *, within: Path | None = None) -> BinaryIO:
    """A file to read. Raises OSError for anything else than a regular file, and for one that is not
    in the folder `within` when its links are followed."""
    require_regular(path)  # opening a device can do something already
    if within is not None:
        require_within(path, within)
    # A FIFO that has taken the place meanwhile must not make us wait for its writer.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.ENXIO, NO_FILE, str(path))
    return file


def read_whole(path: str | Path, *, most: int = WHOLE, within: Path | None = None) -> bytes:
    """The content of a file. Raises OSError as `open_regular`, and for more than `most` bytes."""
    with open_regular(path, within=within) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most:
            return file.read(size)
    raise OSError(errno.EFBIG, f"holds more than {most:,} bytes, which it never should", str(path))


def json_object(path: Path, *, most: int = WHOLE, within: Path | None = None) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = parse_json(read_whole(path, most=most, within=within))
        return found if isinstance(found, dict) else {}
    return {}


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also where it is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that fits a float; true and false are none."""
    return type(value) in (int, float) and abs(value) < 1e300


def is_text(value: Any) -> bool:
    """Whether a value is text."""
    return isinstance(value, str)


def fitting(found: Mapping[str, Any], kinds: Mapping[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """The entries of a JSON object, without entries whose value is not of its kind in `kinds`."""
    return {key: value for key, value in found.items() if key not in kinds or kinds[key](value)}


def lines_of(file: BinaryIO, most: int = LINE) -> Iterator[bytes]:
    """Lines of an open file from its position on, with their ends. Longer ones than `most` bytes
    are left out, and take no more memory than that."""
    while line := file.readline(most):
        if len(line) < most or line.endswith(b"\n"):
            yield line
            continue
        while block := file.read(BLOCK):
            end = block.find(b"\n")
            if end >= 0:
                file.seek(end + 1 - len(block), os.SEEK_CUR)
                break


def require_within(path: str | Path, folder: Path) -> None:
    """Raise OSError for a file that is not in the folder when its links are followed."""
    if not Path(path).resolve().is_relative_to(folder.resolve()):
        raise OSError(errno.ELOOP, f"leads out of {folder}", str(path))


def require_regular(path: str | Path) -> None:
    """Raise OSError for anything else than a regular file, which a library would read for ever."""
    mode = Path(path).stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.ENXIO, NO_FILE, str(path))


def trusted(variable: str) -> bool:
    """Whether the option that sets this environment variable was given."""
    return os.environ.get(variable) == "1"


def require_trust(file: Path | str) -> None:
    """Raise UsageError unless pickles may be read."""
    if not trusted(TRUST_PICKLE):
        raise UsageError(
            f"{file} is a pickle, a format that can run code when it is read",
            hint="--trust-pickle reads it with a restricted reader, which admits only tensors and "
            "plain values; use it for files whose origin you know",
        )


def require_code_trust(origin: str) -> None:
    """Raise UsageError unless code from `origin`, such as a model, may be run."""
    if not trusted(TRUST_CODE):
        hint = "--trust-remote-code allows it; read the code first"
        raise UsageError(f"code of {origin} would run", hint=hint)


TAIL_BYTES = 1 << 16


def append_line(path: Path, record: Mapping[str, Any], *, sync: bool = False) -> None:
    """Add a record; it is with the system when this returns, and on disk if `sync`.

    A line that an earlier writer left unfinished is ended first, so that it spoils only itself.
    """
    with naming(path), opened(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        file.flush()
        if sync:
            os.fsync(file.fileno())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records in order; none if there is no file. A line that is not whole, or longer than
    16 MiB, is passed over. Raises OSError for anything else than a file in its folder."""
    if path.exists():
        with open_regular(path, within=path.parent) as file:
            yield from _parsed(lines_of(file))


def read_tail(path: Path) -> list[dict[str, Any]]:
    """The records of the file's last 64 KiB, which takes no longer for a long file."""
    if not path.exists():
        return []
    with open_regular(path, within=path.parent) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return list(_parsed(lines_of(file)))


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):  # not JSON, or not UTF-8
            record = parse_json(line)
            if isinstance(record, dict):
                yield record


@dataclass
class Tail:
    """Reads what is new in a file since the last call.

    A resumed run replaces `metrics.jsonl` by a shorter file: then `replaced` is true, and all of it
    is new again.
    """

    path: Path
    newest_bytes: int | None = None
    """Begin this many bytes before the end of a longer file; None begins at its start."""
    replaced: bool = field(default=False, init=False)
    """Whether the newest records begin a file that replaces the one before."""
    whole: bool = field(default=True, init=False)
    """Whether the file was read from its start."""
    began: bool = field(default=False, init=False)
    """Whether there has been a file."""
    _offset: int = field(default=0, init=False)
    _file: int = field(default=0, init=False)
    """Inode number of the file that `_offset` is of."""

    def read(self) -> list[dict[str, Any]]:
        """Return the complete records that are new; none if there is no file. A line that is not
        a JSON object is passed over, and one without an end is read when it has one. Raises
        OSError."""
        self.replaced = False
        try:
            file = open_regular(self.path, within=self.path.parent)
        except FileNotFoundError:
            return []
        with file:
            facts = os.fstat(file.fileno())
            if not self.began:
                self._offset = max(0, facts.st_size - (self.newest_bytes or facts.st_size))
                self.whole = self._offset == 0
            elif facts.st_ino != self._file or facts.st_size < self._offset:
                self.replaced, self.whole, self._offset = True, True, 0
            self._file, self.began = facts.st_ino, True
            file.seek(self._offset)
            found: list[dict[str, Any]] = []
            for line in lines_of(file):
                if line.endswith(b"\n"):
                    self._offset = file.tell()
                    found += _parsed([line])
            return found
