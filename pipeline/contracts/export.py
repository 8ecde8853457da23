"""A model on disk in the layout that others load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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


class VerifiesExport(Protocol):
    """A stage that exports models and takes part in `pipe verify`, which finds it by the `writer`
    in a folder's EXPORT_MANIFEST."""

    @classmethod
    def verify(
        cls, folder: Path, report: Callable[[str], object], *, trust_remote_code: bool
    ) -> None:
        """Verify a folder that the stage has written; `report` prints a line. Raises
        ExportError."""


VERIFY = (
    "@classmethod def verify(cls, folder: Path, report: Callable[[str], object], *, "
    "trust_remote_code: bool) -> None"
)
"""The method of VerifiesExport in messages."""
