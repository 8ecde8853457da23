"""The description of an export: `export.json`, by which `pipe verify` works."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from xxhash import xxh3_64

from pipeline import (
    EXPORT_MANIFEST,
    ExportError,
    in_words,
)
from pipeline.utils import open_regular, parse_json, read_whole, replace_text
from stages.model.files import is_plain

NAME = EXPORT_MANIFEST
UNFINISHED = f"{NAME}.tmp"
"""Name under which it is written, which a process that dies leaves."""
CARD = "README.md"
WRITERS = ("export.safetensors", "export.adapter")
"""The stages that write such exports."""
BLOCK = 1 << 24
"""Bytes of a tensor that are written, checksummed and read back as one."""


MOST = 1 << 28
"""Most bytes of a manifest: a checksum for every 16 MiB of the weights, and a name a tensor."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class WeightFile(_Frozen):
    """A finished weight file."""

    size: int
    """Bytes of the whole file."""
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> the format's name of the dtype, and the shape; in the order of the file."""
    sums: dict[str, list[str]]
    """Name -> checksums of its blocks."""


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
    """Largest difference of any logit to the trained model's when the export was made."""


class Manifest(_Frozen):
    """The state of an export: unfinished while `proof` is None, then proven."""

    writer: str = WRITERS[0]
    """The stage that wrote it, for `pipe verify`."""
    plan: str
    """Equal for exports of the same checkpoint into the same bytes."""
    block: int = BLOCK
    """Bytes of a block."""
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
        return sorted({*self.weights, *self.others, NAME})

    def beside(self, folder: Path) -> dict[str, str]:
        """Checksums of the files in `folder` next to the weights and the manifest."""
        names = names_in(folder) - {NAME, *self.weights}
        return {name: content_sum(folder / name) for name in sorted(names)}

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        replace_text(folder / NAME, self.model_dump_json(indent=1) + "\n")


def load(folder: Path) -> Manifest | None:
    """The manifest of an export, finished or not; None for any other folder. Raises ExportError
    when it is damaged."""
    file = folder / NAME
    try:
        content = parse_json(read_whole(file, most=MOST))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ExportError(in_words(error)) from error
    except ValueError as error:
        raise ExportError(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("writer") not in WRITERS:
        return None
    try:
        found = Manifest.model_validate(content)
    except ValidationError as error:
        raise ExportError(f"{file} is damaged: {error.error_count()} fields") from error
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
