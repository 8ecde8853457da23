"""The `.metadata` of torch.distributed.checkpoint, read without running what it may hold."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from pipeline.errors import CheckpointError

MOST_BYTES = 1 << 30

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}  # fmt: skip
_MODULES: dict[str, Any] = {
    "torch.distributed.checkpoint.metadata": metadata,
    "torch.distributed.checkpoint.filesystem": filesystem,
}
_DTYPES = {
    str(t).removeprefix("torch.") for t in vars(torch).values() if isinstance(t, torch.dtype)
}


class _Text:
    """Stands in for the path of the folder where it was saved."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts


class _Refused(Exception):
    """Something that is not admitted."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return getattr(_MODULES[module], name)
        if module == "torch" and (name == "Size" or name in _DTYPES):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return _Text
        raise _Refused(f"{module}.{name}")


def read_metadata(folder: Path) -> Metadata:
    """What the folder holds. Raises CheckpointError."""
    file = folder / ".metadata"
    try:
        if file.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{file}: larger than any list of tensors")
        with file.open("rb") as stream:
            found = _Unpickler(stream).load()
    except CheckpointError:
        raise
    except _Refused as refused:
        raise CheckpointError(
            f"{file}: refused: it holds {refused}, and reading that could run code",
            hint="only descriptions of tensors are read",
        ) from None
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read: {error or type(error).__name__}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{file}: is no metadata of torch.distributed.checkpoint")
    return found
