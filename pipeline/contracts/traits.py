"""Traits: what a stage tells the checks and planners of other stages. A stage has one by having its
attributes, as fields or properties; one without is taken as the docstring says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pipeline.contracts.optimizer import UpdateRule
    from pipeline.contracts.training import KeepsBest


@runtime_checkable
class DeclaresConfig(Protocol):
    """A model of transformers. Another is not compared with the axes of a wrap stage."""

    def config_at_hand(self) -> Mapping[str, Any] | None:
        """The content of its config.json; None where only a network has it."""


@runtime_checkable
class ChangesBlocks(Protocol):
    """A model whose blocks may be compiled (`compile` says how, None that they are not), and may
    repeat single operations of forward in backward. Blocks of another model do neither."""

    compile: Any | None
    recomputes_operations: bool


@runtime_checkable
class FreezesModel(Protocol):
    """A change of a model that freezes its parameters but those whose names match a pattern of
    `train_also`. Another may train all."""

    train_also: Sequence[str]


@runtime_checkable
class NeedsWholeWeights(Protocol):
    """A change of a model for which ranks need whole weights. Another works on parts of them."""

    def needs_whole_weights(self) -> Iterable[tuple[str, str]]:
        """Each setting that makes it do so: a sentence that says why, and what to set instead."""


@runtime_checkable
class DeclaresDtypes(Protocol):
    """A precision whose dtypes are known before it runs. Dtypes of another are not checked."""

    master: str
    compute: str
    reduce: str


@runtime_checkable
class DeclaresRules(Protocol):
    """An optimizer whose update rules are known before it runs. A strategy that cannot run
    another's rules refuses them at the start."""

    def update_rules(self) -> Sequence[UpdateRule]:
        """The rule of each part, in order."""


@runtime_checkable
class LimitsLength(Protocol):
    """Data whose samples have at most `sequence_length` tokens; samples of others any number."""

    sequence_length: int


@runtime_checkable
class HoldsOut(Protocol):
    """Data that may have no held-out samples. Other data have some."""

    holds_out: bool


@runtime_checkable
class HasEpochs(Protocol):
    """Data that say whether the number of samples in an epoch is known. It is, of others."""

    has_epochs: bool


@runtime_checkable
class SavesEvery(Protocol):
    """A checkpoint stage that saves every so many steps, or parts of an epoch; None saves at the
    end only, as another does."""

    every: int | str | None


@runtime_checkable
class RetainsCheckpoints(Protocol):
    """A checkpoint stage that removes checkpoints. Another keeps the newest, and not the best."""

    @property
    def retention(self) -> KeepsBest: ...


@runtime_checkable
class NamesFormat(Protocol):
    """A checkpoint stage whose checkpoints can be read: `format` is one that is installed."""

    format: str


@runtime_checkable
class StartsFrom(Protocol):
    """A stage that continues from what another run has saved."""

    start_from: str | None


@runtime_checkable
class TrainsEpochs(Protocol):
    """A training whose length may be given in epochs."""

    epochs: float | None


@runtime_checkable
class ChunksLoss(Protocol):
    """A training that may compute the loss in chunks. Another computes it at once."""

    loss_chunk_size: int | None


@runtime_checkable
class AddsRouterLoss(Protocol):
    """A training that may add the loss of a router, with this weight. Another adds none."""

    router_loss: Any | None
