"""Damage to files: a flipped bit, and a pickle that runs a command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def flip(file: Path, at: int = -1) -> None:
    """Flip one bit of the byte at `at`."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


class Bomb:
    """Creates the file `mark` by a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)
