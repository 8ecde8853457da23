"""Which attention masks transformers makes of tensors without values; a contract test guards it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def masks_of_values(*, packed: bool) -> Iterator[None]:
    """Inside, models make the masks that they would make of real samples. Of tensors without
    values transformers takes nothing for granted, and makes a whole mask, which is what packed
    samples need; for others it is told to look at the values."""
    from transformers import masking_utils

    original = masking_utils.is_tracing
    if not packed:
        masking_utils.is_tracing = lambda *_: False
    try:
        yield
    finally:
        masking_utils.is_tracing = original
