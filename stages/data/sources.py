"""Sources of rows: local files, and splits of data sets on the Hugging Face hub."""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from pipeline import Problem, StageError
from pipeline.utils import HubName, commit_of, near_path, optional, shown_path
from stages.data.rows import KNOWN, Report, Row, raised, require_columns, rows
from stages.digests import file_digests
from stages.fields import instead_of_variable

Patterns = str | tuple[str, ...]
MOST_FILES = 100_000
"""Most files of a pattern."""
CONVERT = "convert it to one of: " + " ".join(KNOWN)
"""Hint for a file of no kind that can be read."""
_EVERYTHING = re.compile(r"/\*\*(/|\Z)")
"""Beginning of a pattern that searches all folders of the machine."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One part of the data: local files, or a split of a data set on the Hugging Face hub."""

    files: str | tuple[str, ...] = ()
    """Paths or glob patterns, as in the slot's own `files`."""
    dataset: str | None = None
    """Id of a data set on the hub (owner/name), instead of `files`."""
    config: str | None = None
    """Configuration of the hub data set, if it has several."""
    split: str = "train"
    """Split of the hub data set; slices such as `train[:10%]` are understood."""
    revision: str | None = None
    """Commit (40 hexadecimal digits), branch or tag of the hub data set; the main branch by
    default. A run asks for the commit once, says it, and keeps it in its recipe."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of this source in the samples of an epoch, relative to the other sources' weights. Not
    used for held-out sources."""

    def __str__(self) -> str:
        if self.dataset is None:
            return ", ".join(each_pattern(self.files))
        return f"{self.dataset}{f'/{self.config}' if self.config else ''}/{self.split}"


def each_pattern(patterns: Patterns) -> tuple[str, ...]:
    """Return the patterns of a field, which may be a single one, as a tuple."""
    return (patterns,) if isinstance(patterns, str) else patterns


def find_files(patterns: Patterns) -> list[Path]:
    """Return the files that paths and glob patterns match, in the order given, each file once; the
    matches of a pattern are sorted, and end after MOST_FILES + 1. Patterns without a match are
    skipped."""
    found: dict[Path, None] = {}
    for pattern in map(os.path.expanduser, each_pattern(patterns)):
        names = {pattern} if Path(pattern).is_file() else set[str]()
        if not names and not _EVERYTHING.match(pattern):
            for name in glob.iglob(pattern, recursive=True):  # noqa: PTH207 (absolute patterns)
                if Path(name).is_file():
                    names.add(name)
                if len(names) > MOST_FILES:
                    break
        found |= dict.fromkeys(map(Path, sorted(names)))
    return list(found)


def file_problems(key: str, patterns: Patterns) -> Iterator[Problem]:
    """Yield mistakes in a field of files that show without reading one."""
    if not each_pattern(patterns):
        yield Problem(message="no file is named", key=key)
    seen: set[Path] = set()
    for pattern in each_pattern(patterns):
        matches = find_files(pattern)
        if _EVERYTHING.match(pattern):
            hint = "name the folder that holds the files, as in /data/**/*.jsonl"
            yield Problem(message=f"{pattern} looks through the whole machine", key=key, hint=hint)
        elif len(matches) > MOST_FILES:
            message = f"{pattern} matches more than {MOST_FILES:,} files"
            yield Problem(message=message, key=key, hint="pack rows into larger files")
            continue
        elif not matches:
            yield Problem(message=f"no such file: {pattern}", key=key, hint=_instead(pattern))
        for path in matches:
            if not path.name.endswith(KNOWN):
                message = f"{path}: unknown kind of file"
                yield Problem(message=message, key=key, hint=CONVERT)
            if path.resolve() in seen:
                yield Problem(message=f"{path} is named twice", key=key)
            seen.add(path.resolve())


def _instead(pattern: str) -> str:
    """Return a hint for a pattern that matches no file."""
    if "://" in pattern:
        return "data.stream reads addresses, in `shards`"
    if hint := instead_of_variable(pattern):
        return hint
    path = Path(pattern)
    folder = path if path.is_dir() else path.parent
    if folder == path or set(path.name) & set("*?["):
        kinds = sorted({f"*{one.suffix}" for one in folder.glob("*.*")} & {f"*{e}" for e in KNOWN})
        names = " and ".join(str(shown_path(folder / kind)) for kind in kinds)
        return f"there is {names}" if names else f"{shown_path(folder)} has no file to train on"
    if near := near_path(path):
        return near
    if path.is_absolute():
        return ""
    hint = f"paths are relative to the working directory, {Path.cwd()}"
    if _HUB_NAME.fullmatch(pattern) and not pattern.endswith(KNOWN):
        hint = f"a data set of the hub: `sources: [{{dataset: {pattern}, split: train}}]`; {hint}"
    return hint


@dataclass(frozen=True)
class Part:
    """One file of a source, or one split of a hub data set at one commit."""

    name: str | Path
    table: Any = None
    """A `datasets.Dataset` in the hub cache of this machine; None for a file."""

    def rows(self, columns: list[str] | None = None, report: Report = raised) -> Iterator[Row]:
        """Yield every row, or its `columns`; `report` gets the DataError of each that cannot be
        read. Raises DataError for a file that cannot be read, or if a column is missing."""
        if self.table is None:
            yield from rows(Path(self.name), columns, report)
            return
        require_columns(self.name, self.table.column_names, columns)
        table = self.table.select_columns(columns) if columns else self.table
        for number, value in enumerate(table, 1):
            yield Row(file=self.name, number=number, value=value)


@dataclass(frozen=True)
class OpenedSource:
    """A source whose files are found, or split downloaded, when its parts are asked for."""

    source: Source

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """Its files, or the split. Raises StageError if there are none."""
        source = self.source
        if source.dataset is None:
            for problem in file_problems("files", source.files):
                raise StageError(problem.message, hint=problem.hint)
            return tuple(map(Part, find_files(source.files)))
        with optional(
            f"{source}: a hub data set needs the datasets library",
            hint="pip install 'pipetrain[data]'",
        ):
            import datasets
        hub = HubName(
            kind="dataset", repo=source.dataset, revision=source.revision, named_by="", key=""
        )
        commit = commit_of(hub)
        try:
            table = datasets.load_dataset(
                source.dataset, source.config, split=source.split, revision=commit
            )
        except Exception as error:  # from the network, the hub's parsing, or an unknown split
            words = " ".join(str(error).split()) or type(error).__name__
            raise StageError(f"cannot get {source} from the hub: {words}") from error
        return (Part(f"{source}@{commit}", table),)

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal contents: over the contents and kinds (not the names) of files, in order;
        the commit and split of a hub data set."""
        if self.source.dataset is not None:
            return str(self.parts[0].name)
        paths, total = [Path(part.name) for part in self.parts], hashlib.sha256()
        for path, content in zip(paths, file_digests(paths), strict=True):
            total.update(f"{''.join(path.suffixes[-2:])}:{content}\n".encode())
        return total.hexdigest()
