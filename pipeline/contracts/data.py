"""Samples that a run trains and evaluates on."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from pipeline.contracts.sample_order import Order


NO_TARGET = -100
"""Label of a position that is not trained on (torch's cross_entropy `ignore_index`)."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training example. `labels[t]` is the token to be predicted at position t (already shifted
    against `input_ids`), or NO_TARGET. All int64, shape (length,)."""

    input_ids: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any] | None = None
    """The place of each token in its document, which begins anew at 0 with each of several in one
    sample. No token attends to another document's. None: one document."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples of one forward pass. int64, shape (samples, length); short ones are padded on the
    right with NO_TARGET."""

    input_ids: Tensor
    labels: Tensor
    """The token to be predicted at each position, or NO_TARGET."""
    positions: Tensor | None = None
    """As in Sample; None: one document a sample."""
    real: Tensor | None = None
    """False for padding; None: there is none."""
    documents: Sequence[Sequence[int]] | None = None
    """Lengths of the documents of each sample, of padding too, which is one; for the host, as
    `positions` are for the device. None: not known, or one document a sample."""


class Samples(ABC):
    """A map-style sample set. Everything is a pure function of the index; indices are those that
    `order` gives: 0 to `len` - 1, unless the set says otherwise. Samples are read by threads
    (`workers` of the train slot), while the thread that trains asks for targets."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @abstractmethod
    def targets(self, index: int) -> int:
        """Number of this sample's labels that are trained on, known without reading the sample."""

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        """Sum of `targets` over `indices`, which may repeat. Every rank asks for it once per global
        batch, so sets that can answer for many indices at once override it."""
        return sum(map(self.targets, indices.tolist()))

    def order(self, seed: int, *, shuffle: bool) -> Order:
        """The indices in the order in which a run visits them, epoch after epoch."""
        from pipeline.contracts.sample_order import SampleOrder

        return SampleOrder(seed, len(self), shuffle=shuffle)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Samples that a run trains and evaluates on."""

    train: Samples
    heldout: Samples | None
    pad_id: int
    """Token that fills `input_ids` behind a short sample; its labels are NO_TARGET."""
    packed: bool = False
    """Whether samples can hold several documents: whether they have `positions`."""
    identity: Mapping[str, str | int | float | None]
    """Everything that decides what a sample is: digests of the files and of the `tokenizer`, and
    every setting that changes one. Equal identities have equal samples."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of the identity."""
        text = json.dumps(dict(self.identity), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
