"""A model whose linear layers are held in 4 bits, as a model source."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING

from pipeline.artifacts import ModelSource, TensorReader
from pipeline.errors import StageError
from stages.adapter.four_bit_linear import pack_layers, suited
from stages.adapter.four_bit_weights import PackedReader, RoundedReader
from stages.model.derived import DerivedSource
from stages.model.outline import outline

if TYPE_CHECKING:
    from torch import nn

    from stages.adapter.artifact import FourBits


class _FourBitSource(DerivedSource):
    """`base`, whose linear layers but the head have weights that 4 bits hold."""

    def __init__(self, base: ModelSource, kind: FourBits) -> None:
        super().__init__(base)
        self.kind: FourBits = kind

    @functools.cached_property
    def layers(self) -> Collection[str]:
        """Names of these layers. Raises StageError when there is none."""
        found = frozenset(name for name, _ in suited(outline(self.base)))
        if not found:
            raise StageError(
                f"{self.name} has no linear layers to hold in 4 bits", hint="leave out quantize"
            )
        return found

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.base.fingerprint} {self.kind}".encode()).hexdigest()


class QuantisedSource(_FourBitSource):
    """A source that keeps them packed, and unpacks each for its product."""

    @functools.cached_property
    def _rounded(self) -> ModelSource:
        """One, as it finds its layers once."""
        return RoundedSource(self.base.plain, self.kind)

    @property
    def plain(self) -> ModelSource:
        return self._rounded

    @property
    def exported(self) -> ModelSource:
        return RoundedSource(self.base.exported, self.kind)

    @property
    def skeleton(self) -> ModelSource:
        return self.base.skeleton

    def build(self) -> nn.Module:
        model = self.base.build()
        pack_layers(model, self.kind)
        return model

    def weights(self) -> TensorReader:
        return PackedReader(self.base.weights(), self.layers, self.kind)


class RoundedSource(_FourBitSource):
    """This model in an ordinary module: its weights are the values that come out of 4 bits. Its
    base is a plain one."""

    @property
    def plain(self) -> ModelSource:
        return self

    @property
    def exported(self) -> ModelSource:
        return self

    def weights(self) -> TensorReader:
        return RoundedReader(self.base.weights(), self.layers, self.kind)
