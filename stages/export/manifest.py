"""What an export says of itself: `export.json`, with which it can be verified at any time."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from xxhash import xxh3_64_hexdigest

from pipeline.contracts.export import EXPORT_MANIFEST
from pipeline.errors import ExportError
from pipeline.utils.files import replace_text
from stages.adapter.lora import FourBits

NAME = EXPORT_MANIFEST
WRITERS = ("export.safetensors", "export.adapter")
"""The stages that write such exports."""
BLOCK = 1 << 24
"""Bytes of a tensor that are written, checksummed and read back as one."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WeightFile(_Strict):
    """A finished weight file."""

    size: int
    """Bytes of the whole file."""
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> the format's name of the dtype, and the shape; in the order of the file."""
    sums: dict[str, list[str]]
    """Name -> checksums of its blocks."""


class Position(_Strict):
    """The logits at one position of the prompt, in short."""

    norm: float
    """L2 norm over the vocabulary."""
    top: list[tuple[int, float]]
    """The largest ones: token and logit."""


class Proof(_Strict):
    """What the model computes on a prompt."""

    prompt: list[int]
    """Token ids."""
    logits: list[Position]
    difference: float
    """Largest difference of any logit to the trained model's when the export was made."""
    quantize: FourBits | None = None
    """Of an adapter: in which 4 bits the linear layers of its model were."""


class Manifest(_Strict):
    """Of an export that is being written, as long as `proof` is None; then of a proven one."""

    writer: str = WRITERS[0]
    """The stage that wrote it, for `pipe verify`."""
    plan: str
    """Equal for exports of the same checkpoint into the same bytes."""
    block: int
    """Bytes of a block."""
    weights: dict[str, WeightFile] = {}
    """Finished weight files."""
    others: dict[str, str] = {}
    """Every other file -> its checksum (XXH3, 64 bits, hexadecimal)."""
    facts: dict[str, str | int] = {}
    """Where the model comes from, for people."""
    proof: Proof | None = None

    @property
    def files(self) -> list[str]:
        """All of the export's files, this one too."""
        return sorted({*self.weights, *self.others, NAME})

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        replace_text(folder / NAME, self.model_dump_json(indent=1) + "\n")


def checksums(folder: Path, without: Collection[str] = ()) -> dict[str, str]:
    """Of every file in a folder and its sub-folders but the manifest."""
    names = names_in(folder) - {NAME, *without}
    return {name: xxh3_64_hexdigest((folder / name).read_bytes()) for name in sorted(names)}


def names_in(folder: Path) -> set[str]:
    """Relative paths of all files in a folder and its sub-folders."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}


def load(folder: Path) -> Manifest | None:
    """The manifest of a folder that an export has written, or was writing; None for any other.

    Raises ExportError when it is one of ours, but damaged.
    """
    try:
        content: Any = json.loads((folder / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("writer") not in WRITERS:
        return None
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise ExportError(f"{folder / NAME} is damaged: {error.error_count()} fields") from error
