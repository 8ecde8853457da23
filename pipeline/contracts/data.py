"""Samples that a run trains and evaluates on."""

from __future__ import annotations

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """One training example, or several that stay together: in one micro-batch, on one rank."""

    input_ids: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    """The token to be predicted at each position (already shifted against `input_ids`), or
    NO_TARGET. Both are int64, shape (length,)."""
    positions: np.ndarray[Any, Any] | None = None
    """The place of each token in its document, which starts again at 0 with each of several in one
    sample. No token attends to another document's. None: one document."""
    apart: bool = False
    """Whether to put each document on a separate line, instead of all on one."""
    tokens: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    """Further columns with an entry for each token, shape (length, ...)."""
    rows: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    """Columns with an entry for each document, shape (documents, ...)."""
    free: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    """Arguments of the model that have no entry for each token, such as pixels; tensors of several
    samples are joined along the first dimension."""

    @property
    def documents(self) -> int:
        """Number of documents, each a row of the micro-batch."""
        return 1 if self.positions is None else int((self.positions == 0).sum())


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward pass, by name. A *line* holds one document or several. A *row* is a
    document: rows are in the order of the data, line after line."""

    tokens: Mapping[str, Tensor]
    """Tensors with an entry for each token, shape (lines, length, ...): `input_ids`, `labels` (the
    token to be predicted at each position, or NO_TARGET), `positions` as in Sample (left out: one
    document a line), `real` (False for padding; left out: there is none), and columns of the data.
    They are padded, and cut along the sequence."""
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns of the data with an entry for each row, shape (rows, ...)."""
    free: Mapping[str, Tensor] = field(default_factory=dict)
    """Further arguments of the model, neither padded nor cut."""
    documents: Sequence[Sequence[int]] | None = None
    """Lengths of each line's documents, its padding last; the host reads them where the device
    reads `positions`. None: not known, or one document a line."""
    size: int = -1
    """Number of rows; -1: one for each line."""

    def __post_init__(self) -> None:
        if self.size < 0:
            object.__setattr__(self, "size", len(self.input_ids))

    @property
    def input_ids(self) -> Tensor:
        return self.tokens["input_ids"]

    @property
    def labels(self) -> Tensor:
        return self.tokens["labels"]

    @property
    def positions(self) -> Tensor | None:
        return self.tokens.get("positions")

    @property
    def real(self) -> Tensor | None:
        return self.tokens.get("real")

    @property
    def filler(self) -> bool:
        """Whether there are no rows: the rank takes part in a forward pass that counts nothing."""
        return self.size == 0

    def changed(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """The micro-batch with each of its tensors changed."""
        tokens, rows, free = (
            {name: change(tensor) for name, tensor in sort.items()}
            for sort in (self.tokens, self.rows, self.free)
        )
        return replace(self, tokens=tokens, rows=rows, free=free)

    def sum_rows(self, values: Tensor) -> Tensor:
        """Sum `values`, shape (lines, length), over the tokens of each row, in the same order
        whatever the device; shape (rows,)."""
        import torch

        # Chosen, not multiplied: what is not finite in one row stays there.
        if self.positions is not None:
            return torch.where(self._members, values.flatten(), 0.0).sum(1)
        own = values if self.real is None else torch.where(self.real, values, 0.0)
        return own.sum(1)[: self.size]

    def row_ends(self) -> Tensor:
        """Index of each row's last token in the flattened lines; shape (rows,)."""
        import torch

        own = self._members
        return (own * torch.arange(own.shape[1], device=own.device)).amax(1)

    @functools.cached_property
    def _members(self) -> Tensor:
        """Whether a token belongs to a row; shape (rows, tokens)."""
        import torch

        ids = self.input_ids
        begin = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        starts = (begin if self.positions is None else self.positions) == 0
        real = torch.ones_like(starts) if self.real is None else self.real
        number = (starts & real).flatten().cumsum(0) - 1
        rows = torch.arange(self.size, device=ids.device)[:, None]
        return (number == rows) & real.flatten()


class Samples(ABC):
    """A map-style sample set. Everything is a pure function of the index; indices are in the order
    of `order`: 0 to `len` - 1, unless the set says otherwise. Samples are read by threads
    (`workers` of the train slot), while the thread that trains asks for targets."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @abstractmethod
    def targets(self, index: int) -> int:
        """Number of this sample's labels that are trained on, known without reading the sample."""

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        """Sum of `targets` over `indices`, which may repeat. Every rank asks for each global batch
        and its micro-batches, so sets that can answer for many indices at once override it."""
        return sum(map(self.targets, indices.tolist()))

    def total_rows(self, indices: NDArray[np.int64]) -> int:
        """Number of documents in the samples at `indices`, which may repeat. Reads them; sets that
        know it otherwise override it."""
        # What is no sample is named when it is trained or evaluated on.
        return sum(getattr(self[index], "documents", 1) for index in indices.tolist())

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
    """Token that fills `input_ids` after a short sample; its labels are NO_TARGET."""
    group: int = 1
    """Rows that belong together, such as the 2 of a pair: each sample holds one such group or
    several, in order."""
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
