"""Progress of a training, its checkpoints, and its result."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from pipeline.contracts.stage import Durable, ResourceNeed
from pipeline.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class TrainingLength:
    """Length of a training, as needed to count its checkpoints."""

    steps: int | None = None
    """Optimizer steps; None: not known."""
    epoch: Fraction | None = None
    """Steps of an epoch, which need not be whole: samples / global batch size; None: not known."""
    eval_every: int | str | None = None
    """Steps between evaluations, as `in_steps` reads them; None: at the end only."""
    eval_first: bool = False
    """Whether there is one before the first step."""
    saves_first: bool = False
    """Whether the state before the first step is saved."""

    def in_steps(self, every: int | str | None) -> Fraction | None:
        """Return the steps of a period that is a number of steps (`200`) or a part of an epoch
        (`0.25 epochs`, `1/3 epochs`); None for None, or if an epoch's steps are not known."""
        if not isinstance(every, str):
            return None if every is None else Fraction(every)
        return None if self.epoch is None else Fraction(every.split()[0]) * self.epoch


def ends_period(step: int, period: Fraction | None) -> bool:
    """Return whether a period of that many steps ends with this step, which is so for the steps
    ceil(k x period), k = 1, 2, ...: the first by which k periods are over."""
    return period is not None and step > 0 and step // period > (step - 1) // period


@dataclass(kw_only=True)
class Progress:
    """Progress of a training. Counts are over all ranks. Part of every checkpoint, as JSON."""

    step: int = 0
    """Optimizer steps done, those skipped for overflow too; not anomalous steps that were left out,
    whose place the next batch takes."""
    samples: int = 0
    """Global index of the next sample: position in the endless shuffled sequence."""
    tokens: int = 0
    """Target tokens trained on."""
    skipped: int = 0
    """Steps whose update was skipped for overflow, and no others: batches that the anomaly action
    `skip` drops are in `left_out`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The latest `loss`; `eval_loss` and `perplexity` if these weights were evaluated."""
    best: dict[str, float] = field(default_factory=dict)
    """The lowest held-out loss, `eval_loss`, and its `step`; empty before the first evaluation."""
    patience: dict[str, float] = field(default_factory=dict)
    """Early stopping: the `eval_loss` to improve on, and the `evaluations` since it improved."""
    stopped: str = ""
    """Why training ended before its last step, if it did: early stopping, or a callback."""
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the newest steps, where loss spikes are looked for; oldest first."""
    left_out: list[list[int]] = field(default_factory=list)
    """Positions of the sample order without an update, as [start, stop) in ascending order: those
    of anomalous steps, and of steps that a rollback undid."""
    left_out_in_a_row: int = 0
    """Anomalous steps since the last update."""
    texts_step: int | None = None
    """Step at which the model wrote texts last; None before the first time."""
    rollbacks: int = 0
    """Number of times that training went back to a checkpoint."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """State of step callbacks: `Callbacks.state()`."""
    lineage: dict[str, Any] = field(default_factory=dict)
    """Identity of the model, tokenizer, data, seed, order and global batch, without which the
    position means nothing."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str = "") -> Progress:
        """Progress from its JSON. Raises CheckpointError, naming `where`, for unknown fields."""
        fields = dict(record)
        if "origin" in fields:  # the name of `lineage` in checkpoints of version 0.1.0
            fields["lineage"] = fields.pop("origin")
        if "texts" in fields:  # in older checkpoints; its 0 meant either
            fields["texts_step"] = fields.pop("texts") or None
        try:
            return cls(**fields)
        except TypeError as error:
            place = f"{where}: " if where else ""
            raise CheckpointError(f"{place}written by another version: {error}") from error

    def differs_from(self, recorded: Mapping[str, Any]) -> bool:
        """Whether a record of this step's progress is out of date. Only a changed `lineage` does
        not count: nothing has been trained under it."""
        before = Progress.from_record(recorded)
        return {**vars(before), "lineage": None} != {**vars(self), "lineage": None}

    def as_new_run(self) -> Progress:
        """Progress of a new run that starts here: the same step and data position, without this
        run's evaluations and anomalies."""
        kept = ("step", "samples", "tokens", "skipped", "recent_losses", "lineage")
        return copy.deepcopy(Progress(**{name: getattr(self, name) for name in kept}))


@dataclass(frozen=True, kw_only=True)
class WrittenCheckpoint:
    """A checkpoint that is on disk, and the cost of writing it while training continues."""

    step: int
    seconds: float
    """From the beginning of its save until it was on disk."""
    ended: float
    """Seconds since 1970 at which it was on disk."""
    size: int
    """Bytes that all ranks wrote."""
    user_seconds: float
    system_seconds: float
    """Processor time of all ranks' writers, and of the system for these."""


class Checkpoints(ABC):
    """Checkpoints of a run: where, when and in which format training state is saved."""

    @property
    def counts_epochs(self) -> bool:
        """Whether `begin` needs the steps of an epoch."""
        return False

    def begin(self, length: TrainingLength) -> None:
        """Called on every rank before the first step; does nothing unless overridden."""

    def poll(self) -> Sequence[WrittenCheckpoint]:
        """Look after the save that is being written; called on every rank after each step and each
        save. Returns the checkpoints that came on disk since the last call, oldest first; empty on
        ranks above 0. Raises CheckpointError if the save failed. Does nothing unless overridden."""
        return ()

    @abstractmethod
    def due(self, progress: Progress) -> bool:
        """Whether to write a checkpoint now."""

    @abstractmethod
    def save(self, progress: Progress) -> None:
        """Save the engine's whole state (collective). May return before it is on disk, and before
        the engine may change if that waits by itself (`Engine.before_change`). If the newest
        checkpoint is of this step, only the progress is written. Raises CheckpointError when it, or
        the save before it, fails."""

    @abstractmethod
    def finish(self) -> str:
        """Wait until everything that was saved is on disk (collective); the address of the newest
        checkpoint. Raises CheckpointError when a save has failed."""

    @abstractmethod
    def restore(self, validate: Callable[[Progress], None]) -> Progress | None:
        """Load the newest complete checkpoint into the engine (collective); None if there is none.
        Can be called again in the middle of a training, to go back. `validate` gets the progress
        before anything is loaded, and raises if it must not be continued. Raises CheckpointError if
        the checkpoint cannot be loaded."""

    def resource_needs(self, length: TrainingLength) -> Iterator[ResourceNeed]:
        """Resource needs of the checkpoints of a training of that length; called only on rank 0,
        before the first step."""
        return iter(())

    def best(self) -> TrainedRun:
        """The checkpoint with the lowest held-out loss, once `finish` has returned (collective).
        Raises CheckpointError when there is none."""
        raise CheckpointError("these checkpoints do not record which one is the best")

    def close(self) -> None:
        """Release what they hold, at the end of the run or after a failure."""


@dataclass(frozen=True, kw_only=True)
class TrainedRun(Durable):
    """A finished training: the checkpoint that later stages take, and how far it had come."""

    checkpoint: str
    """Address of the checkpoint: a path, or a URL that fsspec knows."""
    progress: Progress

    def record(self) -> dict[str, Any]:
        return {"checkpoint": self.checkpoint, "progress": vars(self.progress)}

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> TrainedRun:
        checkpoint = str(record["checkpoint"])
        if "://" not in checkpoint and not Path(checkpoint).is_dir():
            raise CheckpointError(f"the trained checkpoint is gone: {checkpoint}")
        return cls(checkpoint=checkpoint, progress=Progress.from_record(record["progress"]))


class KeepsBest(Protocol):
    """How many of the best checkpoints are kept."""

    best: int
