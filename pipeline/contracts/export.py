"""A model on disk in the layout that others load, and a loaded one that writes text: what `pipe
chat` and `pipe generate` ask for an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pipeline.contracts.stage import Context, Durable
from pipeline.errors import ExportError

if TYPE_CHECKING:
    from pipeline.contracts.model import ModelSource, Weights
    from pipeline.contracts.training import TrainedRun

EXPORT_MANIFEST = "export.json"
"""File of an exported model's folder: the stage that wrote it (`writer`), and how to verify it."""


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
        """Verify a folder that it has written; `report` prints a line. Raises ExportError."""


VERIFY = (
    "@classmethod def verify(cls, folder: Path, report: Callable[[str], object], *, "
    "trust_remote_code: bool) -> None"
)
"""The method of VerifiesExport in messages."""


Message = Mapping[str, str]
"""`role` (system, user, assistant) and `content`."""


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Settings of a text to be written."""

    max_tokens: int
    """Most tokens of the text."""
    temperature: float = 0.0
    """Logits are divided by this before a token is drawn; 0 takes the most probable one."""
    seed: int = 0
    """Equal seeds draw equal texts."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A text that a model has written."""

    text: str
    tokens: int
    """Tokens of the text, the end of turn included."""
    ended: bool
    """Whether the model ended the text; otherwise `max_tokens` did."""


class TextModel(ABC):
    """A model in memory, with its tokenizer."""

    dtype: str
    """As in a recipe."""
    device: str
    has_template: bool
    """Whether its tokenizer has a chat template."""

    @abstractmethod
    def answer(
        self, messages: Sequence[Message], how: Writing, show: Callable[[str], object]
    ) -> Written:
        """Answer a conversation, laid out by the chat template; `show` takes each piece of the text
        as it comes. Raises StageError if the template refuses it, or if it is too long."""

    @abstractmethod
    def continue_text(self, text: str, how: Writing, show: Callable[[str], object]) -> Written:
        """Continue a text as it is. Raises StageError if it has no tokens, or is too long."""

    @abstractmethod
    def has_room(self) -> bool:
        """Whether another model of the same size fits into memory next to it."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory."""


@runtime_checkable
class OpensText(Protocol):
    """A stage that exports models and loads them for `pipe chat`, each onto `ctx.dist.device`; they
    raise StageError or UsageError. The built-in `export` stage opens folders and checkpoints of a
    stage without these methods."""

    @classmethod
    def open_folder(
        cls, folder: Path, ctx: Context, model: ModelSource | None, *, trust_remote_code: bool
    ) -> TextModel:
        """Load an export that the stage has written, or any folder in Hugging Face layout. `model`
        is the base model, for an adapter; None if it is not known."""

    def open_trained(
        self, ctx: Context, weights: Weights, model: ModelSource, trained: TrainedRun
    ) -> TextModel:
        """Load the model that `run` would export, without writing it."""

    def open_source(self, ctx: Context, model: ModelSource) -> TextModel:
        """Load the model before training, in the dtype of the export."""
