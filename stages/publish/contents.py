"""What is uploaded: the files that the export lists, and nothing else that lies beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts import ExportedModel
from pipeline.errors import StageError


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A file of the export, with its name in the repository."""

    name: str
    path: Path
    size: int


def contents(model: ExportedModel) -> list[LocalFile]:
    """The files of the export, by name. Raises StageError when one is gone or lies elsewhere."""
    found = {file.name: file for listed in model.files for file in _files(model.folder, listed)}
    if not found:
        raise StageError(f"the export in {model.folder} lists no files")
    return [found[name] for name in sorted(found)]


def _files(folder: Path, listed: str) -> Iterator[LocalFile]:
    """The listed file; of a listed folder all that is in it."""
    place = folder / listed
    inside = place.rglob("*") if place.is_dir() else [place]
    for path in inside:
        if not path.is_dir():
            yield _file(folder, path)


def _file(folder: Path, path: Path) -> LocalFile:
    if not path.is_file():
        raise StageError(
            f"a file of the export is gone: {path}", hint="export again, into another folder"
        )
    if not path.resolve().is_relative_to(folder.resolve()):
        raise StageError(f"a file that the export lists is not in its folder: {path}")
    return LocalFile(name=path.relative_to(folder).as_posix(), path=path, size=path.stat().st_size)
