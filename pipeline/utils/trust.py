"""Permissions that the command line can grant, and a recipe cannot."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.errors import UsageError

TRUST_PICKLE = "PIPE_TRUST_PICKLE"
"""Environment variable that `--trust-pickle` sets, for the processes of the run too."""
TRUST_CODE = "PIPE_TRUST_REMOTE_CODE"
"""The same for `--trust-remote-code`."""
IS_PICKLE = "is a pickle, a format that can run code when it is read"
PICKLE_HINT = (
    "--trust-pickle reads it with a restricted reader, which admits only tensors and plain "
    "values; use it for files whose origin you know"
)
CODE_HINT = "--trust-remote-code allows it; read the code first"


def trusted(variable: str) -> bool:
    """Whether the option that sets this environment variable was given."""
    return os.environ.get(variable) == "1"


def require_trust(file: Path | str) -> None:
    """Raise UsageError unless pickles may be read."""
    if not trusted(TRUST_PICKLE):
        raise UsageError(f"{file} {IS_PICKLE}", hint=PICKLE_HINT)


def require_code_trust(origin: str) -> None:
    """Raise UsageError unless code from `origin`, such as a model, may be run."""
    if not trusted(TRUST_CODE):
        raise UsageError(f"code of {origin} would run", hint=CODE_HINT)
