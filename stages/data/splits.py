"""Setting aside the held-out part of a sample set."""

from __future__ import annotations

from pipeline.errors import StageError


def split(count: int, fraction: float) -> int:
    """How many of `count` samples are for training when the last `fraction` is held out.

    At least one sample is held out when `fraction` is above 0. Raises StageError when none is left.
    """
    held = max(1, round(count * fraction)) if fraction > 0 else 0
    if held >= count:
        raise StageError(
            f"holding out {fraction:g} of {count} samples leaves none to train on",
            hint="use more data, shorter samples or `heldout_files`",
        )
    return count - held
