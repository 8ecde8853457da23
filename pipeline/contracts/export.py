"""A model on disk in the layout that others load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contracts.stage import Durable
from pipeline.errors import ExportError

EXPORT_MANIFEST = "export.json"
"""File of an exported model's folder that says which stage wrote it (`writer`) and how it can be
verified."""


@dataclass(frozen=True, kw_only=True)
class ExportedModel(Durable):
    """A folder that `transformers` loads, verified by loading it."""

    folder: Path
    files: Sequence[str]
    total_bytes: int

    def record(self) -> dict[str, Any]:
        return {**vars(self), "folder": str(self.folder), "files": list(self.files)}

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> ExportedModel:
        folder = Path(record["folder"])
        missing = [name for name in record["files"] if not (folder / name).exists()]
        if missing:
            raise ExportError(f"the exported model is gone: {folder / missing[0]}")
        return cls(folder=folder, files=record["files"], total_bytes=record["total_bytes"])
