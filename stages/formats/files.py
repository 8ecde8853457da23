"""Files of `torch.save`, read without running what they may hold.

A pickle can call any function when it is read. torch's restricted unpickler admits tensors and
plain containers; what a format needs beyond that is admitted class by class, as an inert stand-in.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from pipeline.errors import CheckpointError

Admitted = Sequence[tuple[type, str]]
"""Stand-ins, and the full names that they stand in for."""

_MET = re.compile(r"GLOBAL ([\w.]+)")


def load(file: Path, admitted: Admitted = (), *, verify: bool = True) -> Any:
    """The content of a file, its tensors mapped from disk. Raises CheckpointError for a file that
    is damaged (`verify` reads all of it for that), and for one that would need more than is
    admitted."""
    if verify:
        require_intact(file)
    try:
        with torch.serialization.safe_globals(list(admitted)):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise explained(error, str(file)) from error


def require_intact(file: Path) -> None:
    """Compare the checksums that `torch.save` put beside every tensor, as a stream."""
    try:
        with zipfile.ZipFile(file) as archive:
            wrong = archive.testzip()
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if wrong is not None:
        raise CheckpointError(f"{file}: damaged: the checksum of {wrong} in it is wrong")


def explained(error: Exception, where: str) -> CheckpointError:
    """The unpickler's error in words: what it met, and that this is refused."""
    if not isinstance(error, pickle.UnpicklingError):
        return CheckpointError(f"{where}: cannot be read: {_first_line(error)}")
    met = _MET.search(str(error))
    what = met.group(1) if met else "more than tensors and plain values"
    return CheckpointError(
        f"{where}: refused: it holds {what}, and reading that could run code",
        hint="save it again without that, with the tool that wrote it",
    )


@contextlib.contextmanager
def understood(folder: Path | str, writer: str) -> Iterator[None]:
    """What was read safely can still have another structure than the version that is known here."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder}: not as {writer} writes it in the versions that are known here: "
            f"{type(error).__name__}: {error}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def save(value: Any, file: Path) -> None:
    """Write `value` as a new file. Raises OSError."""
    with file.open("xb") as stream:
        append(value, stream)


def append(value: Any, stream: IO[bytes]) -> None:
    """Write `value` at the stream's place. Raises OSError."""
    try:
        torch.save(value, stream)
    except RuntimeError as error:
        # torch complains that too little arrived, of what the file system refused.
        cause = error.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, stream.name) from None
        raise


PROGRESS = "progress.json"
"""The progress of a training of ours, in a checkpoint of a foreign format; written last."""


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` and force it to disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError when it is missing or damaged."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value
