"""Tokenised data on disk, found by the digest of all that shaped it; complete or not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import DataError, StageError
from pipeline.utils.files import replace_text

if TYPE_CHECKING:
    from pipeline.contracts.stage import Context
    from stages.data.verified import VerifiedArray


FORMAT = 4
"""Raise it with every change in what is written; entries of another format are built again."""
KEYS = 3
"""Part of every key, and so of what checkpoints say of their data: it stays as it is."""
META = "meta.json"
_ABANDONED_AFTER = 24 * 3600.0

Counts = dict[str, int]
Build = Callable[[Path], Counts]
"""Writes an entry's files into a folder and returns its counts."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A complete cache entry: a folder of arrays and their counts."""

    folder: Path
    key: str
    counts: Counts
    reused: bool

    def array(self, name: str, dtype: str) -> VerifiedArray:
        """One of the entry's files."""
        from stages.data.verified import VerifiedArray

        return VerifiedArray(self.folder / name, dtype)


def digest(parts: object) -> str:
    """Hex SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def default_folder() -> Path:
    """`pipetrain` in the user's cache folder (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "pipetrain"


def cache_folder(given: str | None) -> Path:
    """The folder that a `cache` field names, or the default one."""
    return Path(given).expanduser() if given else default_folder()


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the system refuses in a cache folder becomes a StageError."""
    try:
        yield
    except OSError as error:
        raise StageError(
            f"cannot write the cache in {folder}: {error}", hint="set `cache` to another folder"
        ) from error


def prepare(ctx: Context, folder: Path, make_key: Callable[[], str], build: Build) -> Entry:
    """The entry of a key, built if need be; collective.

    Rank 0 computes the key and builds; then one process of every node that does not see rank 0's
    folder builds its own. Raises StageError when that node's key is another.
    """
    key, reused = "", True
    with ctx.dist.rank0_first() as main:
        if main:
            key = make_key()
            reused = _ensure(folder, key, build)
    key = ctx.dist.broadcast_str(key if main else None)
    if not main and ctx.dist.local_rank == 0:
        reused = _ensure(folder, key, _of_the_same(key, make_key, build))
    ctx.dist.barrier()
    counts = _complete(folder / key)
    if counts is None:
        raise StageError(f"the cache entry {folder / key} is gone", hint="is the disk full?")
    return Entry(folder=folder / key, key=key, counts=counts, reused=reused)


def _of_the_same(key: str, make_key: Callable[[], str], build: Build) -> Build:
    """`build`, where what it reads has this key."""

    def checked(partial: Path) -> Counts:
        if make_key() != key:
            raise StageError(
                "this machine's data or tokenizer are not those of the first machine",
                hint="copy the same files to every machine, or share them",
            )
        return build(partial)

    return checked


def local_entry(folder: Path, key: str, build: Build) -> Entry:
    """The entry of a key, built by this process if need be, whatever others do."""
    reused = _ensure(folder, key, build)
    return Entry(folder=folder / key, key=key, counts=_complete(folder / key) or {}, reused=reused)


def _ensure(folder: Path, key: str, build: Build) -> bool:
    """Make the entry exist; whether it already did."""
    final = folder / key
    if _complete(final) is not None:
        return True
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        partial = Path(tempfile.mkdtemp(prefix=f"{key[:16]}-", suffix=".partial", dir=folder))
        try:
            _fill(partial, build)
            _publish(partial, final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return False


def _fill(partial: Path, build: Build) -> None:
    from stages.data.verified import write_sums

    counts = build(partial)
    for path in list(partial.iterdir()):
        write_sums(path)
    sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
    for name in sizes:
        with (partial / name).open("rb") as file:
            os.fsync(file.fileno())
    told = {"format": FORMAT, "sizes": sizes, "counts": counts}
    meta = {**told, "digest": digest(told)}
    with (partial / META).open("w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _publish(partial: Path, final: Path) -> None:
    if final.exists() and _complete(final) is None:
        shutil.rmtree(final)
    try:
        partial.replace(final)
    except OSError:
        if _complete(final) is None:  # otherwise another run was faster, with the same content
            raise


def _complete(final: Path) -> Counts | None:
    """The counts of an entry whose files all have the size they were written with, else None. Their
    content is compared when it is read."""
    try:
        meta = json.loads((final / META).read_text("utf-8"))
        written = meta.pop("digest")
        sizes = {name: (final / name).stat().st_size for name in meta["sizes"]}
        if written != digest(meta) or meta["format"] != FORMAT or sizes != meta["sizes"]:
            return None
        return dict(meta["counts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _sweep(folder: Path) -> None:
    """Remove what killed builds left behind; a live one has written to its files today."""
    for partial in folder.glob("*.partial"):
        with contextlib.suppress(FileNotFoundError):  # its process has finished it meanwhile
            written = [path.stat().st_mtime for path in (partial, *partial.iterdir())]
            if time.time() - max(written) > _ABANDONED_AFTER:
                shutil.rmtree(partial, ignore_errors=True)


SETTLED = 60.0
"""Seconds. A file that was changed later than that before it was read could change again at what
its file system takes for the same time; its digest is not kept."""

Stamp = list[int]


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Hex SHA-256 of the content of each file. Files that must be read are read in threads."""
    names = [str(path.absolute()) for path in paths]
    place = default_folder() / "digests" / f"{digest(names)}.json"
    known, now = _kept(place), time.time()
    stamps = [_stamp(path) for path in paths]
    entries = {
        name: known[name]
        for name, stamp in zip(names, stamps, strict=True)
        if name in known and known[name][0] == stamp
    }
    changed = [number for number, name in enumerate(names) if name not in entries]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        contents = dict(zip(changed, pool.map(_content, (paths[n] for n in changed)), strict=True))
    for number in changed:
        if (
            stamps[number] == _stamp(paths[number])
            and max(stamps[number][1:3]) / 1e9 < now - SETTLED
        ):
            entries[names[number]] = (stamps[number], contents[number])
    if changed:
        _keep(place, entries)
    return [contents.get(number) or entries[name][1] for number, name in enumerate(names)]


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=path) from error
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=path) from error


def _kept(place: Path) -> dict[str, tuple[Stamp, str]]:
    """Digests that were kept earlier; none where they are damaged."""
    try:
        kept = json.loads(place.read_text("utf-8"))
        if digest(kept["files"]) != kept["digest"]:
            return {}
        return {name: (stamp, content) for name, (stamp, content) in kept["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _keep(place: Path, entries: dict[str, tuple[Stamp, str]]) -> None:
    """Where that is not possible, files are read again next time."""
    text = json.dumps({"files": entries, "digest": digest(entries)})
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_text(place, text)
