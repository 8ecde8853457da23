"""The held-out part of a data set."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.errors import Problem, StageError
from stages.data.sources import Patterns, expand, problems


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


def check(
    files: Patterns, heldout_files: Patterns, heldout_fraction: float, suffixes: tuple[str, ...]
) -> Iterator[Problem]:
    """Mistakes in the fields that say what is trained on and what is held out."""
    yield from problems("files", files, suffixes)
    if not heldout_files:
        return
    yield from problems("heldout_files", heldout_files, suffixes)
    if heldout_fraction:
        yield Problem(
            message="excludes `heldout_files`", key="heldout_fraction", hint="leave out one of them"
        )
    known = {path.resolve() for path in expand(files)}
    for path in expand(heldout_files):
        if path.resolve() in known:
            yield Problem(message=f"{path} is also trained on", key="heldout_files")
