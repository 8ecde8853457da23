"""The weight files of a folder in Hugging Face layout."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import StageError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
COMMIT = re.compile(r"[0-9a-f]{40}")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


@dataclass(frozen=True, kw_only=True)
class Files:
    """A local folder, and the GGUF file in it when that is what counts."""

    folder: Path
    gguf: str | None = None

    def __str__(self) -> str:
        return str(self.folder / self.gguf) if self.gguf else str(self.folder)


def is_local(path: str) -> bool:
    """Whether `path` names something on disk rather than on the hub."""
    return path.startswith(("/", "./", "../", "~")) or path in (".", "..") or is_gguf(path)


def is_gguf(path: str) -> bool:
    """Whether `path` is a GGUF file by its name."""
    return path.lower().endswith(".gguf")


def local(path: str) -> Path:
    """The path with `~` expanded."""
    return Path(path).expanduser()


def is_plain(name: str) -> bool:
    """Whether a file name from outside stays inside the folder it is taken relative to."""
    parts = Path(name).parts
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds any file of a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


SAFETENSORS_INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"


def safetensors_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder, in order; empty when it has none."""
    return _files(folder, SAFETENSORS_INDEX, "model.safetensors")


def bin_files(folder: Path) -> list[Path]:
    """The torch files of the folder, in order; empty when it has none."""
    return _files(folder, BIN_INDEX, "pytorch_model.bin")


def weight_files(folder: Path, gguf: str | None) -> list[Path]:
    """The files that the weights are read from. Raises StageError when there are none."""
    files = [folder / gguf] if gguf else safetensors_files(folder) or bin_files(folder)
    if not files:
        raise StageError(
            f"no weights in {folder}",
            hint="expected model.safetensors, model.safetensors.index.json or pytorch_model.bin",
        )
    for file in files:
        if not file.is_file():
            raise StageError(f"a weight file is missing: {file}")
    return files


def _files(folder: Path, index: str, single: str) -> list[Path]:
    if (folder / single).is_file():
        return [folder / single]
    if not (folder / index).is_file():
        return []
    names = sorted(set(_weight_map(folder / index).values()))
    for name in names:
        # An index is data from outside: it must not make us read elsewhere.
        if not is_plain(name):
            raise StageError(f"{folder / index} points outside its folder: {name!r}")
    return [folder / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(index.read_text("utf-8"))
        weight_map = content["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise StageError(f"{index} is damaged: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise StageError(f"{index} is damaged: weight_map is not a mapping of names to files")
    return weight_map


EDGE = 1 << 20
UNSTABLE = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "_model_name_or_path")


def source_fingerprint(
    config: Any, files: Iterable[Path], *, seed: int | None, new: Sequence[str] = ()
) -> str:
    """sha256 over the config, the weight files, and the seed and names of what is drawn.

    Of a file count its name, size, first and last MiB: cheap for any model, and the first MiB of a
    safetensors file is (or starts with) its header.
    """
    stable = {key: value for key, value in config.to_dict().items() if key not in UNSTABLE}
    digest = hashlib.sha256(json.dumps(stable, sort_keys=True, default=str).encode())
    if seed is not None:
        digest.update(f"random {seed}".encode())
        digest.update("\0".join(new).encode())
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        digest.update(_edges(file))
    return digest.hexdigest()


def _edges(file: Path) -> bytes:
    with file.open("rb") as stream:
        first = stream.read(EDGE)
        stream.seek(max(0, file.stat().st_size - EDGE))
        return first + stream.read(EDGE)
