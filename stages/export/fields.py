"""Mistakes in the fields that all exports have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import Problem


def problems(folder: str | None, prompt: str) -> Iterator[Problem]:
    """Of the fields `folder` and `prompt`."""
    if not prompt.strip():
        yield Problem(message="must not be empty", key="prompt")
    if folder is not None:
        yield from _folder(Path(folder).expanduser())


def _folder(folder: Path) -> Iterator[Problem]:
    from stages.export.target import PARTIAL, foreign

    if folder.name.endswith(PARTIAL):
        yield Problem(
            message=f"`{folder.name}` is what an unfinished export is called",
            key="folder", hint=f"choose a name that does not end in `{PARTIAL}`",
        )  # fmt: skip
    reason = foreign(folder)
    if reason:
        yield Problem(message=reason, key="folder", hint="name a new folder")
