"""Tell a local path from a hub id; name the files a model comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
