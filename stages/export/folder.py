"""Mistakes in the field that says where an export goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import Problem


def folder_problems(name: str | None) -> Iterator[Problem]:
    """Of the field `folder`; nothing when it is not set."""
    from stages.export.target import PARTIAL, foreign

    if name is None:
        return
    folder = Path(name).expanduser()
    if folder.name.endswith(PARTIAL):
        yield Problem(
            message=f"`{folder.name}` is what an unfinished export is called",
            key="folder", hint=f"choose a name that does not end in `{PARTIAL}`",
        )  # fmt: skip
    reason = foreign(folder)
    if reason:
        yield Problem(message=reason, key="folder", hint="name a new folder")
