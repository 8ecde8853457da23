"""Sources of rows: local files, and splits of data sets on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import DataError, Problem, StageError
from pipeline.utils import HubName, commit_of, near_path, optional, replace_text, shown_path
from stages.data.cache import cache_folder, digest
from stages.data.rows import KNOWN, Report, Row, raised, require_columns, rows
from stages.fields import instead_of_variable

if TYPE_CHECKING:
    from stages.data.fields import Source

Patterns = str | tuple[str, ...]
MOST_FILES = 100_000
"""Most files of a pattern."""


def each_pattern(patterns: Patterns) -> tuple[str, ...]:
    """Return the patterns of a field, which may be a single one, as a tuple."""
    return (patterns,) if isinstance(patterns, str) else patterns


def find_files(patterns: Patterns) -> list[Path]:
    """Return the files that paths and glob patterns match, in the order given, each file once; the
    matches of a pattern are sorted. Patterns without a match are skipped."""
    found = (path for pattern in each_pattern(patterns) for path in _matches(pattern))
    return list(dict.fromkeys(found))


def _matches(pattern: str) -> list[Path]:
    expanded = os.path.expanduser(pattern)  # noqa: PTH111 (a pattern is not a path)
    if Path(expanded).is_file():
        return [Path(expanded)]
    if _is_everything(expanded):
        return []
    found = glob.iglob(expanded, recursive=True)  # noqa: PTH207 (absolute patterns)
    names = (name for name in found if Path(name).is_file())
    return [Path(name) for name in sorted(itertools.islice(names, MOST_FILES + 1))]


def _is_everything(pattern: str) -> bool:
    """Whether a pattern looks through all folders of the machine."""
    return pattern.startswith("/") and "**" in pattern.split("/")[:2]


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def _existing(pattern: Path) -> str:
    """Return a hint with what there is in the place of a pattern that matches no file."""
    folder = pattern if pattern.is_dir() else pattern.parent
    if folder == pattern or set(pattern.name) & set("*?["):
        kinds = sorted({f"*{one.suffix}" for one in folder.glob("*.*")} & {f"*{e}" for e in KNOWN})
        names = " and ".join(str(shown_path(folder / kind)) for kind in kinds)
        return f"there is {names}" if names else f"{shown_path(folder)} has no file to train on"
    return near_path(pattern)


def file_problems(key: str, patterns: Patterns) -> Iterator[Problem]:
    """Yield mistakes in a field of files that show without reading one."""
    if not each_pattern(patterns):
        yield Problem(message="no file is named", key=key)
    seen: set[Path] = set()
    for pattern in each_pattern(patterns):
        matches = _matches(pattern)
        if _is_everything(pattern):
            hint = "name the folder that holds the files, as in /data/**/*.jsonl"
            yield Problem(message=f"{pattern} looks through the whole machine", key=key, hint=hint)
        elif len(matches) > MOST_FILES:
            message = f"{pattern} matches more than {MOST_FILES:,} files"
            yield Problem(message=message, key=key, hint="pack rows into larger files")
            continue
        elif not matches:
            address = "://" in pattern and "data.stream reads addresses, in `shards`"
            hint = address or instead_of_variable(pattern) or _existing(Path(pattern))
            if not hint and not Path(pattern).is_absolute():
                hint = f"paths are relative to the working directory, {Path.cwd()}"
                if _HUB_NAME.fullmatch(pattern) and not pattern.endswith(KNOWN):
                    source = f"sources: [{{dataset: {pattern}, split: train}}]"
                    hint = f"a data set of the hub: `{source}`; {hint}"
            yield Problem(message=f"no such file: {pattern}", key=key, hint=hint)
        for path in matches:
            yield from kind_problems(key, str(path))
            if path.resolve() in seen:
                yield Problem(message=f"{path} is named twice", key=key)
            seen.add(path.resolve())


def kind_problems(key: str, name: str) -> Iterator[Problem]:
    """Yield the mistake of a path or address whose ending is of no kind that can be read."""
    if not name.endswith(KNOWN):
        hint = "convert it to one of: " + " ".join(KNOWN)
        yield Problem(message=f"{name}: unknown kind of file", key=key, hint=hint)


SETTLED = 60.0
"""Seconds. The digest of a file is not kept if the file was changed less than this before it was
read: a later change could get the same time stamp."""

Stamp = list[int]


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Return the hex SHA-256 of the content of each file. Files that are new or have changed are
    read in threads; the digests of the others are known from an earlier call."""
    names = [str(path.absolute()) for path in paths]
    record = cache_folder() / "digests" / f"{digest(names)}.json"
    known, now = _kept(record), time.time()

    def stamp_and_digest(path: Path) -> tuple[Stamp, str]:
        stamp, entry = _stamp(path), known.get(str(path.absolute()))
        return entry if entry and entry[0] == stamp else (stamp, content_digest(path))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(stamp_and_digest, paths))
    kept = {
        name: entry
        for name, entry, path in zip(names, found, paths, strict=True)
        if entry[0] == _stamp(path) and max(entry[0][1:3]) / 1e9 < now - SETTLED
    }
    if kept != known:
        text = json.dumps({"files": kept, "digest": digest(kept)})
        with contextlib.suppress(OSError):  # the files are read again next time
            record.parent.mkdir(parents=True, exist_ok=True)
            replace_text(record, text)
    return [content for _, content in found]


def _stamp(path: Path) -> Stamp:
    """Return a file's size, times (ns) and inode."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def content_digest(path: Path) -> str:
    """Return the hex SHA-256 of a file's content. Raises DataError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=path) from error


def _kept(record: Path) -> dict[str, tuple[Stamp, str]]:
    """Return the digests in a record of an earlier call; none if it is damaged."""
    try:
        kept = json.loads(record.read_text("utf-8"))
        if digest(kept["files"]) != kept["digest"]:
            return {}
        return {name: (stamp, content) for name, (stamp, content) in kept["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


@dataclass(frozen=True)
class LocalFile:
    """One file of a source."""

    name: Path

    def rows(self, columns: list[str] | None = None, report: Report = raised) -> Iterator[Row]:
        """Yield every row, or its `columns`; `report` is given the DataError of each that cannot be
        read. Raises DataError for a file that cannot be read."""
        return rows(self.name, columns, report)


@dataclass(frozen=True)
class HubSplit:
    """One split of a hub data set at one commit, in the hub cache of this machine."""

    name: str
    table: Any
    """A `datasets.Dataset`."""

    def rows(self, columns: list[str] | None = None, report: Report = raised) -> Iterator[Row]:
        """Yield every row, or its `columns`. Raises DataError if a column is missing."""
        require_columns(self.name, self.table.column_names, columns)
        table = self.table.select_columns(columns) if columns else self.table
        for number, value in enumerate(table, 1):
            yield Row(file=self.name, number=number, value=value)


Part = LocalFile | HubSplit


@dataclass(frozen=True)
class OpenedSource:
    """A source with its files found, or its split downloaded."""

    source: Source
    parts: tuple[Part, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal contents: over the contents and kinds (not the names) of files, in order;
        the commit and split of a hub data set."""
        paths = [part.name for part in self.parts if isinstance(part, LocalFile)]
        if not paths:
            return "/".join(str(part.name) for part in self.parts)
        total = hashlib.sha256()
        for path, content in zip(paths, file_digests(paths), strict=True):
            total.update(f"{''.join(path.suffixes[-2:])}:{content}\n".encode())
        return total.hexdigest()


def open_source(source: Source) -> OpenedSource:
    """Find the files of a source, or download its split. Raises StageError if there is nothing that
    can be read."""
    if source.dataset is not None:
        return OpenedSource(source, (_hub_split(source),))
    for problem in file_problems("files", source.files):
        raise StageError(problem.message, hint=problem.hint)
    return OpenedSource(source, tuple(map(LocalFile, find_files(source.files))))


def _hub_split(source: Source) -> HubSplit:
    needed = f"{source}: a hub data set needs the datasets library"
    with optional(needed, hint="pip install 'pipetrain[data]'"):
        import datasets
    name = HubName(
        kind="dataset", repo=str(source.dataset), revision=source.revision, named_by="", key=""
    )
    commit = commit_of(name)
    try:
        table = datasets.load_dataset(
            source.dataset, source.config, split=source.split, revision=commit
        )
    except Exception as error:  # from the network, the hub's parsing, or an unknown split
        words = " ".join(str(error).split()) or type(error).__name__
        raise StageError(f"cannot get {source} from the hub: {words}") from error
    return HubSplit(f"{source}@{commit}", table)
