"""The folder of an export: its manifest `export.json`, and how one export takes another's place.

An export is written to a partial folder next to its target, proven, and swapped with an earlier
one. Only files that an earlier export wrote, by its manifest, are ever replaced; an export that is
damaged, or was changed by hand, is kept aside.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from xxhash import xxh3_64

from pipeline import EXPORT_MANIFEST, Context, ExportError, StageError, in_words
from pipeline.utils import (
    expanded,
    open_regular,
    parse_json,
    read_whole,
    replace_text,
    sync,
    sync_tree,
)
from stages.model.files import is_plain

UNFINISHED = f"{EXPORT_MANIFEST}.tmp"
"""Name under which the manifest is written; a process that dies leaves it."""
CARD = "README.md"
EDITABLE = (CARD, "generation_config.json", "chat_template.jinja")
"""Files of an export that people change, and that it can be used with."""
WRITERS = ("export.safetensors", "export.adapter")
"""The stages that write such exports."""
PARTIAL = ".partial"
"""Suffix of the folder of an unfinished export, which is emptied when its plan changes."""
BLOCK = 1 << 24
"""Bytes of a tensor that are written, checksummed and read back as one."""
MOST = 1 << 28
"""Most bytes of a manifest: a checksum for every 16 MiB of the weights, and a name a tensor."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class WeightFile(_Frozen):
    """A safetensors file, planned or written."""

    size: int
    """Bytes of the whole file."""
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> the format's name of the dtype, and the shape; in the order of the file."""
    sums: dict[str, list[str]] = {}
    """Name -> checksums (XXH3, 64 bits, hexadecimal) of its blocks; empty before it is written."""


class Position(_Frozen):
    """A summary of the logits at one position of the prompt."""

    norm: float
    """L2 norm over the vocabulary."""
    top: list[tuple[int, float]]
    """The largest ones: token and logit."""


class Proof(_Frozen):
    """The logits that an export computed when it was made."""

    prompt: list[int]
    """Token ids."""
    logits: list[Position]
    difference: float
    """Largest difference of any logit from the trained model's when the export was made."""


class Manifest(_Frozen):
    """The state of an export: unfinished while `proof` is None, then proven."""

    writer: str = WRITERS[0]
    """The stage that wrote it, for `pipe verify`."""
    plan: str
    """Equal for exports of the same checkpoint into the same bytes."""
    block: int = BLOCK
    weights: dict[str, WeightFile] = {}
    """Finished weight files."""
    others: dict[str, str] = {}
    """Every other file -> its checksum (XXH3, 64 bits, hexadecimal)."""
    passed: list[str] = []
    """Names of the tensors that are the model source's, byte for byte."""
    facts: dict[str, str | int] = {}
    """Origin of the model, for people."""
    proof: Proof | None = None

    @property
    def files(self) -> list[str]:
        """All of the export's files, including the manifest."""
        return sorted({*self.weights, *self.others, EXPORT_MANIFEST})

    def sums_of_others(self, folder: Path) -> dict[str, str]:
        """Checksums of the files in `folder` other than the weights and the manifest."""
        names = names_in(folder) - {EXPORT_MANIFEST, *self.weights}
        return {name: content_sum(folder / name) for name in sorted(names)}

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        replace_text(folder / EXPORT_MANIFEST, self.model_dump_json(indent=1) + "\n")


def load(folder: Path) -> Manifest | None:
    """The manifest of an export, finished or not; None for any other folder. Raises ExportError
    when it is damaged."""
    file = folder / EXPORT_MANIFEST
    try:
        content = parse_json(read_whole(file, most=MOST))
        if not isinstance(content, dict) or content.get("writer") not in WRITERS:
            return None
        found = Manifest.model_validate(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ExportError(in_words(error)) from error
    except ValidationError as error:
        raise ExportError(f"{file} is damaged: {error.error_count()} fields") from error
    except ValueError as error:
        raise ExportError(f"{file} is damaged: {error}") from error
    outside = next((name for name in found.files if not is_plain(name)), None)
    if outside is not None:
        raise ExportError(f"{file} is damaged: it names a file elsewhere, {outside!r}")
    return found


def content_sum(file: Path) -> str:
    """Checksum of a file next to the weights. Raises OSError for a pipe or a device."""
    digest = xxh3_64()
    with open_regular(file) as stream:
        while piece := stream.read(BLOCK):
            digest.update(piece)
    return digest.hexdigest()


def names_in(folder: Path) -> set[str]:
    """Relative paths of all files in a folder and its sub-folders."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}


def foreign(folder: Path) -> str | None:
    """The reason why nothing may take the place of `folder`; None for an export, one that had just
    begun, or nothing."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if os.path.ismount(folder):
        return f"{folder} is a mount point, which cannot be replaced"
    if {entry.name for entry in folder.iterdir()} <= {UNFINISHED}:
        return None
    try:
        written = load(folder)
    except ExportError:
        return None  # it is kept aside
    if written is None:
        return f"{folder} holds other files than an export by pipe"
    added = sorted(names_in(folder) - set(written.files)) if written.proof is not None else []
    names = ", ".join(added[:10])
    return f"{folder} holds files that were added after its export: {names}" if added else None


def changed(folder: Path) -> str | None:
    """The changes of an export since it was written, in words; None without any, or if there is no
    export. Weights are not read: a new export replaces them."""
    try:
        written = load(folder)
        if written is None or written.proof is None:
            return None
        found = written.sums_of_others(folder).items() - written.others.items()
    except (ExportError, OSError) as error:
        return in_words(error)
    names = ", ".join(sorted(dict(found))[:10])
    return f"changed after it was written: {names}" if found else None


def damaged(folder: Path, written: Manifest) -> str | None:
    """The damage to a finished export, in words: a file that is missing, cut, or not as it was
    written. None without any; weights are not read, and EDITABLE files may differ."""
    for name in written.files:
        if not (folder / name).is_file():
            return f"{name} is missing"
    for name, entry in written.weights.items():
        size = (folder / name).stat().st_size
        if size != entry.size:
            return f"{name} has {size:,} bytes instead of {entry.size:,}"
    for name, expected in written.others.items():
        if name not in EDITABLE and content_sum(folder / name) != expected:
            return f"{name} is not as it was written"
    return None


def finished(folder: Path, plan: str) -> Manifest | None:
    """The manifest of the export `plan`, if `folder` holds that and nothing else."""
    with contextlib.suppress(ExportError, OSError):
        found = load(folder)
        if found is None or found.proof is None or found.plan != plan or foreign(folder):
            return None
        whole = all((folder / name).is_file() for name in found.weights)
        return found if whole and found.others == found.sums_of_others(folder) else None
    return None


def target_of(name: str | None, ctx: Context) -> Path:
    """The folder of the export; links are followed, so that it is replaced where it really is."""
    folder = expanded(name) if name else ctx.run_dir / "export"
    return folder.resolve()


def partial_of(folder: Path) -> Path:
    """The folder in which the export is written until it is proven."""
    return folder.with_name(folder.name + PARTIAL)


def claim(folder: Path, plan: str, held: contextlib.ExitStack, log: logging.Logger) -> Manifest:
    """Make the partial folder of `folder`, which no other process can claim until `held` ends;
    returns the manifest of what it holds of the export `plan`. Raises StageError if another process
    has claimed it, and if a folder must not be replaced."""
    partial, previous = partial_of(folder), folder.with_name(f".{folder.name}.previous")
    if not folder.exists() and previous.exists():
        # A crash fell between the two renames of an earlier swap.
        previous.replace(folder)
    for place in (folder, partial, previous):
        if reason := foreign(place):
            raise StageError(reason, hint="name another folder in the export slot, or move it away")
        if damage := changed(place):
            asides = (place.with_name(f"{place.name}.changed-{n}") for n in itertools.count(1))
            aside = place.rename(next(each for each in asides if not each.exists()))
            log.warning("%s: %s; it is kept as %s", place, damage, aside)
    shutil.rmtree(previous, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StageError(f"another process is writing to {partial}") from error
    except OSError:
        pass  # not every file system can lock a folder
    begun = load(partial)
    if begun is None or begun.plan != plan:
        clear(partial)
        begun = Manifest(plan=plan)
        begun.save(partial)
    return begun


def clear(partial: Path, keep: Collection[str] = ()) -> None:
    """Remove everything but the manifest and the files `keep`."""
    for entry in partial.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in {EXPORT_MANIFEST, *keep}:
            entry.unlink()


def put_in_place(folder: Path, finished: Manifest) -> None:
    """Flush the partial folder to disk, manifest last, and swap it for an earlier export."""
    partial, previous = partial_of(folder), folder.with_name(f".{folder.name}.previous")
    sync_tree(partial)
    finished.save(partial)
    sync(partial / EXPORT_MANIFEST)
    sync(partial)
    if folder.exists():
        folder.replace(previous)
    partial.replace(folder)
    sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)
