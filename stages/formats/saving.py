"""`torch.save` whose errors say what the disk said."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import torch


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
