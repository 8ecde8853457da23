"""A file of tokens to train on, skewed so that there is something to learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stages.data.samples import TOKENS

SAMPLES = 2048
DTYPE = "<u4"
SKEW = 4.0


def write_tokens(folder: Path, *, vocab: int, length: int) -> None:
    """Write SAMPLES x `length` + 1 independent tokens below `vocab`, low ids far more often."""
    generator = np.random.default_rng(0)
    uniform = generator.random(SAMPLES * length + 1)
    (vocab * uniform**SKEW).astype(DTYPE).tofile(folder / TOKENS)


def map_tokens(folder: Path) -> np.ndarray[Any, Any]:
    """Return the same file, memory-mapped; shape (tokens,)."""
    return np.memmap(folder / TOKENS, dtype=DTYPE, mode="r")
