"""Pickles are read only if the user says so, and then without running anything in them."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.errors import UsageError

TRUST = "PIPE_TRUST_PICKLE"
"""Environment variable that `--trust-pickle` sets, for the processes of the run too."""
IS_PICKLE = "is a pickle, a format that can run code when it is read"
HINT = (
    "--trust-pickle reads it with a restricted reader, which admits tensors and plain values "
    "alone; use it for files whose origin you know"
)


def trusted() -> bool:
    """Whether pickles may be read."""
    return os.environ.get(TRUST) == "1"


def require_trust(file: Path | str) -> None:
    """Raise UsageError unless pickles may be read."""
    if not trusted():
        raise UsageError(f"{file} {IS_PICKLE}", hint=HINT)
