"""Traits: what a stage tells the checks and planners of other stages. A stage has one by having its
attributes, as fields or properties; one without is taken as the docstring says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pipeline.checkpoint import Retention


@runtime_checkable
class DeclaresConfig(Protocol):
    """A model of transformers. Another is not compared with the axes of a wrap stage."""

    def config_at_hand(self) -> Mapping[str, Any] | None:
        """The content of its config.json; None where only a network has it."""


@runtime_checkable
class RecomputesOperations(Protocol):
    """A model whose backward may repeat single operations of forward. Another repeats none."""

    @property
    def recomputes_operations(self) -> bool: ...


@runtime_checkable
class CompilesBlocks(Protocol):
    """A model whose blocks may be compiled. Those of another are not."""

    @property
    def compile(self) -> Any | None:
        """How; None if they are not."""


@runtime_checkable
class NeedsWholeWeights(Protocol):
    """A change of a model for which ranks need whole weights. Another works on parts of them."""

    def needs_whole_weights(self) -> Iterable[tuple[str, str]]:
        """Each setting because of which it does: a sentence that says why, and what to set
        instead."""


@runtime_checkable
class DeclaresDtypes(Protocol):
    """A precision whose dtypes are known before it runs. Those of another are not checked."""

    @property
    def master(self) -> str: ...

    @property
    def compute(self) -> str: ...

    @property
    def reduce(self) -> str: ...


@runtime_checkable
class LimitsLength(Protocol):
    """Data whose samples have at most `sequence_length` tokens. Those of others may have any
    number."""

    @property
    def sequence_length(self) -> int: ...


@runtime_checkable
class HoldsOut(Protocol):
    """Data that may have no held-out samples. Other data have some."""

    @property
    def holds_out(self) -> bool: ...


@runtime_checkable
class HasEpochs(Protocol):
    """Data whose samples may not be counted. Those of others are."""

    @property
    def has_epochs(self) -> bool:
        """Whether the number of samples in an epoch is known."""


@runtime_checkable
class SavesEvery(Protocol):
    """A checkpoint stage that saves before the end of the training. Another saves at the end."""

    @property
    def every(self) -> int | str | None:
        """Steps, or a part of an epoch; None saves at the end only."""


@runtime_checkable
class RetainsCheckpoints(Protocol):
    """A checkpoint stage that removes checkpoints. Another keeps the newest ones, and not the
    best."""

    @property
    def retention(self) -> Retention: ...


@runtime_checkable
class NamesFormat(Protocol):
    """A checkpoint stage whose checkpoints can be read: `format` is one that is installed."""

    @property
    def format(self) -> str: ...


@runtime_checkable
class StartsFrom(Protocol):
    """A stage that goes on from what another run has saved."""

    @property
    def start_from(self) -> str | None: ...


@runtime_checkable
class TrainsEpochs(Protocol):
    """A training whose length may be given in epochs."""

    @property
    def epochs(self) -> float | None: ...


@runtime_checkable
class ChunksLoss(Protocol):
    """A training that may compute the loss in chunks. Another computes it at once."""

    @property
    def loss_chunk_size(self) -> int | None: ...


@runtime_checkable
class AddsRouterLoss(Protocol):
    """A training that may add the loss of a router. Another adds none."""

    @property
    def router_loss(self) -> Any | None:
        """Its weight; None adds none."""
