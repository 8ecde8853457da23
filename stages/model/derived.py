"""A model source that is another one with something changed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contracts.model import ModelSource
from pipeline.contracts.tensors import TensorReader, Weights

if TYPE_CHECKING:
    from torch import nn


class DerivedSource(ModelSource):
    """Everything as in `base`; subclasses change what they are about."""

    def __init__(self, base: ModelSource) -> None:
        self.base = base
        self.name = base.name

    def build(self) -> nn.Module:
        return self.base.build()

    def weights(self) -> TensorReader:
        return self.base.weights()

    def tie(self, model: nn.Module) -> None:
        self.base.tie(model)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return self.base.blocks(model)

    def external_parameter_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        return self.base.external_parameter_modules(model)

    def compiled_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        return self.base.compiled_modules(model)

    def tokenizer(self) -> Any:
        return self.base.tokenizer()

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def fingerprint(self) -> str:
        return self.base.fingerprint

    @property
    def contents(self) -> str | None:
        return self.base.contents

    @property
    def location(self) -> str | None:
        return self.base.location

    @property
    def revision(self) -> str | None:
        return self.base.revision

    @property
    def frozen_base(self) -> Collection[str]:
        return self.base.frozen_base

    @property
    @abstractmethod
    def inference_view(self) -> ModelSource:
        """The same on top of the plain base."""

    @property
    def export_view(self) -> ModelSource:
        return self.base.export_view

    def merge_trained(self, trained: Weights) -> Weights:
        return self.base.merge_trained(trained)

    def save_assets(self, folder: Path, *, dtype: str) -> None:
        self.base.save_assets(folder, dtype=dtype)
