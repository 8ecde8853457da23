"""What a folder is to hold beside each other, and how it is proven."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.contracts.model import ModelSource
from pipeline.contracts.tensors import Weights
from stages.export.card import MODEL_USAGE, Usage
from stages.export.logits import logits, reference
from stages.export.plan import ExportPlan, make_plan
from stages.export.proof import compare, prove_model, token_ids
from stages.model.declared import outline
from stages.weights.views import JoinedReader

if TYPE_CHECKING:
    from torch import Tensor

    from stages.export.manifest import Proof

MERGED_TOLERANCE = 1e-4
"""Largest difference of fp32 logits, relative to the largest of them, that may come from adding
before multiplying instead of after."""


class Contents(ABC):
    """An export: its weight files, what lies beside them, and the proof of both."""

    writer: str
    """The stage, for `pipe verify`."""
    usage: Usage
    source: ModelSource
    prompt: str

    @abstractmethod
    def plan(self, beside: str) -> ExportPlan:
        """What goes where; `beside` is a digest of everything else. Raises StageError."""

    @abstractmethod
    def save_beside(self, folder: Path, *, dtype: str) -> None:
        """Write what others need beside the weights."""

    def close(self) -> None:
        """Release what was opened for it."""

    @abstractmethod
    def prove(self, folder: Path, plan: ExportPlan) -> Proof:
        """Load the folder as others do and compare with what was trained. Raises ExportError."""


class ModelContents(Contents):
    """A model in Hugging Face layout."""

    writer = "export.safetensors"
    usage = MODEL_USAGE

    def __init__(
        self, source: ModelSource, trained: Weights, *, dtype: str, max_shard_size: int, prompt: str
    ) -> None:
        self.source = source
        self.prompt = prompt
        self._trained = trained
        self._weights = source.merge_trained(trained)
        self._dtype = dtype
        self._max_shard_size = max_shard_size

    def plan(self, beside: str) -> ExportPlan:
        return make_plan(
            self.source.export_view, self._weights, self._dtype, self._max_shard_size, beside=beside
        )

    def save_beside(self, folder: Path, *, dtype: str) -> None:
        self.source.export_view.save_assets(folder, dtype=dtype)

    def prove(self, folder: Path, plan: ExportPlan) -> Proof:
        if self._weights is not self._trained:
            self._prove_assembled()
        return prove_model(folder, self.source.export_view, plan.tensors, plan.outline, self.prompt)

    def close(self) -> None:
        if self._weights is not self._trained:
            self._weights.close()

    def _prove_assembled(self) -> None:
        """The exported model computes what the trained one does, both in fp32."""
        ids = token_ids(self.source, self.prompt)
        compare(
            in_full_precision(self.source.export_view, self._weights, ids),
            trained_logits(self.source, self._trained, ids),
            MERGED_TOLERANCE,
        )


def trained_logits(source: ModelSource, trained: Weights, ids: Tensor) -> Tensor:
    """What the model computes with a checkpoint's values and, where it left any out, the source's;
    in fp32, shape (1, length, vocabulary)."""
    plain = source.inference_view
    with_source = Overlaid(trained, plain)
    try:
        return in_full_precision(plain, with_source, ids)
    finally:
        with_source.close_source()


def in_full_precision(source: ModelSource, tensors: Weights, ids: Tensor) -> Tensor:
    """Logits of the source's module with these values cast to fp32, one block at a time."""
    names = outline(source).state_dict()
    dtypes = {
        name: torch.float32 if tensor.is_floating_point() else tensor.dtype
        for name, tensor in names.items()
    }
    return logits(reference(source, tensors, dtypes), ids)


class Overlaid(JoinedReader, Weights):
    """A checkpoint's tensors, and the source's where it has none."""

    def __init__(self, trained: Weights, source: ModelSource) -> None:
        self.identity = trained.identity
        self._source_reader = source.weights()
        super().__init__(trained, self._source_reader)

    def close_source(self) -> None:
        """Close what was opened here."""
        self._source_reader.close()
