"""Progress of a training, its checkpoints, and its result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contracts.stage import Durable
from pipeline.errors import CheckpointError, StageError

if TYPE_CHECKING:
    from pipeline.contracts.resources import ResourceNeed
    from pipeline.distributed.process_group import DistContext


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
    """Optimizer steps done, those skipped for overflow too; not those that were left out as
    anomalous, whose place the next batch takes."""
    samples: int = 0
    """Global index of the next sample: position in the endless shuffled sequence."""
    tokens: int = 0
    """Target tokens trained on."""
    skipped: int = 0
    """Steps skipped for overflow."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The latest `loss`; `eval_loss` and `perplexity` if these weights were evaluated."""
    best: dict[str, float] = field(default_factory=dict)
    """The lowest held-out loss so far, `eval_loss`, and the `step` at which it was reached; empty
    before the first evaluation."""
    patience: dict[str, float] = field(default_factory=dict)
    """State of early stopping: the `eval_loss` to improve on, and the number of `evaluations` since
    the last improvement."""
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
    def from_record(cls, record: Mapping[str, Any]) -> Progress:
        """Progress from its JSON. Raises TypeError for unknown fields."""
        fields = dict(record)
        if "origin" in fields:  # the name of `lineage` in checkpoints of version 0.1.0
            fields["lineage"] = fields.pop("origin")
        if "texts" in fields:  # in older checkpoints; its 0 meant either
            fields["texts_step"] = fields.pop("texts") or None
        return cls(**fields)

    def differs_from(self, recorded: Mapping[str, Any]) -> bool:
        """Whether a record of this step's progress is out of date. A changed `lineage` alone does
        not count: nothing has been trained under it."""
        before = Progress.from_record(recorded)
        return {**vars(before), "lineage": None} != {**vars(self), "lineage": None}

    def as_new_run(self) -> Progress:
        """Progress of a new run that starts here: the same step and data position, without this
        run's evaluations and anomalies."""
        return Progress(
            step=self.step,
            samples=self.samples,
            tokens=self.tokens,
            skipped=self.skipped,
            recent_losses=list(self.recent_losses),
            lineage=self.lineage,
        )


class StepCallback(ABC):
    """Code of a plugin that a train stage calls after every update, such as a metrics sink.

    A stage in a slot before the train slot returns it. It is called on every rank, in the thread
    that trains, and may use collectives. It does not change `progress`. An exception fails the
    run; `reason_to_end` ends the training well.
    """

    @abstractmethod
    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        """Called after update number `step` (from 1), before the model is evaluated and before a
        checkpoint of this step is saved; not for steps that were dropped as anomalous. Where
        neither comes next, the weights may be those of the next update; `progress` is
        as of `step`.

        `record` has the numbers that `metrics.jsonl` has of the step (docs/training.md): `loss`
        and speeds over all ranks, `time` and `step_seconds` of this rank; NaN if unknown.
        """

    def on_evaluation(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        """Called after an evaluation of the weights of `step`, 0 before the first update, with the
        held-out `eval_loss` and `perplexity` over all ranks. Does nothing unless overridden."""

    def reason_to_end(self) -> str:
        """Return why training should end now, in words; empty to continue, as it does unless this
        is overridden.

        Called on every rank before each step, also before the first. One rank's reason is enough:
        all ranks end after the same step, and the run continues with a save and with later slots.
        A step that was launched before the numbers of the last one were known still counts:
        `on_step` and `on_evaluation` are called for it, but nobody is asked again.
        """
        return ""

    def state(self) -> Mapping[str, Any]:
        """JSON to keep in a checkpoint, which has rank 0's. Called before the first step and before
        every save."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Called on every rank with the state from the checkpoint of `step`, before the next step:
        when a run resumes, and when it goes back to a checkpoint. Not called without a state."""


class Callbacks(StepCallback):
    """Several callbacks, called in the given order; None and nested Callbacks are resolved.

    A stage that adds a callback to those of earlier slots takes `earlier: StepCallback | None` and
    returns `Callbacks(earlier, its_own)`. States are kept by class name, numbered from the second
    callback of a class on, so a resume with other callbacks gives each its own state.
    """

    def __init__(self, *callbacks: StepCallback | None) -> None:
        """Raises StageError for what is no StepCallback."""
        self._callbacks: dict[str, StepCallback] = {}
        self._reasons: dict[str, str] = {}
        """Callback -> its reason to end the training, the same on all ranks."""
        for given in callbacks:
            several = given._callbacks.values() if isinstance(given, Callbacks) else [given]
            for callback in several:
                if callback is not None:
                    _require_callback(callback)
                    self._callbacks[self._free_name(type(callback))] = callback

    def _free_name(self, kind: type) -> str:
        name = f"{kind.__module__}:{kind.__qualname__}"
        number = sum(other.partition("#")[0] == name for other in self._callbacks)
        return f"{name}#{number + 1}" if number else name

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        for callback in self._callbacks.values():
            callback.on_step(step, progress, record)

    def on_evaluation(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        for callback in self._callbacks.values():
            callback.on_evaluation(step, progress, record)

    def reason_to_end(self) -> str:
        """The first reason that was agreed on or, before that, of a callback of this rank."""
        known = iter(self._reasons.values())
        return next(known, "") or next(iter(self._own_reasons().values()), "")

    def _own_reasons(self) -> dict[str, str]:
        """Callback -> its reason on this rank, of those that have one. Raises StageError."""
        asked = {n: _reason(n, c) for n, c in self._callbacks.items() if _can_end(c)}
        return {name: reason for name, reason in asked.items() if reason}

    def agree_to_end(self, dist: DistContext) -> str:
        """Ask the callbacks that can end the training, and return the reason of the first rank that
        has one, the same on all ranks (collective); empty if training goes on."""
        if not self._reasons and any(map(_can_end, self._callbacks.values())):
            own = self._own_reasons()
            if dist.any(bool(own)):  # the reasons themselves are only sent at the end
                self._reasons = next(reasons for reasons in dist.gather(own) if reasons)
        return next(iter(self._reasons.values()), "")

    def state(self) -> dict[str, Any]:
        """Non-empty states by the names of callbacks, and reasons of callbacks without a state.
        Raises StageError for a state that is not JSON."""
        states = {name: _state(name, callback) for name, callback in self._callbacks.items()}
        kept = {name: state for name, state in states.items() if state}
        reasons = {name: why for name, why in self._reasons.items() if name not in kept}
        return {**kept, **({REASONS: reasons} if reasons else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give each callback its state. A callback that keeps a state decides by it whether the
        training is still over, perhaps under other settings; the reason of one without a state
        stands for as long as the recipe has the callback."""
        reasons = state.get(REASONS, {})
        self._reasons = {name: why for name, why in reasons.items() if name in self._callbacks}
        for name, callback in self._callbacks.items():
            if name in state:
                callback.restore(state[name])


REASONS = "reasons to end"
"""Key of reasons in the state of callbacks, which is no class's name."""


def _can_end(callback: StepCallback) -> bool:
    return type(callback).reason_to_end is not StepCallback.reason_to_end


def _require_callback(callback: object) -> None:
    if not isinstance(callback, StepCallback):
        kind = type(callback)
        raise StageError(
            f"{kind.__module__}:{kind.__qualname__} is not a callback",
            hint=f"derive {kind.__qualname__} from StepCallback",
        )


def _state(name: str, callback: StepCallback) -> dict[str, Any]:
    """Return a callback's state, which can be written as JSON."""
    state: object = callback.state()
    if not isinstance(state, Mapping):
        raise StageError(
            f"the state of the callback {name} is a {type(state).__name__}",
            hint="`state` returns a mapping",
        )
    found = dict(state)
    odd = _not_json(found)
    if odd:
        raise StageError(
            f"the state of the callback {name} is not JSON: {odd}",
            hint="return lists, finite numbers and texts",
        )
    return found


def _not_json(value: object, path: str = "") -> str:
    """Return what of a value cannot be written as JSON; empty if all of it can."""
    inner: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        odd = [key for key in value if not isinstance(key, str | int)]
        if odd:
            return f"{path or 'it'} has the key {odd[0]!r}"
        inner = ((f"{path}.{key}" if path else str(key), one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        inner = ((f"{path}[{number}]", one) for number, one in enumerate(value))
    elif isinstance(value, float) and not math.isfinite(value):
        return f"{path} is {value}"
    elif not (value is None or isinstance(value, str | int | float)):
        return f"{path} is a {type(value).__name__}"
    return next(filter(None, (_not_json(one, at) for at, one in inner)), "")


def _reason(name: str, callback: StepCallback) -> str:
    reason: object = callback.reason_to_end()
    if not isinstance(reason, str):
        raise StageError(
            f"the callback {name} returned {reason!r} as its reason to end, which is not a text",
            hint="return a sentence, or an empty text to continue",
        )
    return reason


@dataclass(frozen=True, kw_only=True)
class WrittenCheckpoint:
    """A checkpoint that is on disk, and the cost of writing it beside the training."""

    step: int
    seconds: float
    """From the beginning of its save until it was on disk."""
    ended: float
    """Seconds since 1970 at which it was on disk."""
    size: int
    """Bytes that all ranks wrote."""
    user_seconds: float
    """Processor time of all ranks' writers, without the system's."""
    system_seconds: float
    """Processor time of the system for these writers."""


class Checkpoints(ABC):
    """Checkpoints of a run: where, when and in which format training state is saved."""

    @property
    def counts_epochs(self) -> bool:
        """Whether `begin` needs the steps of an epoch."""
        return False

    def begin(self, length: TrainingLength) -> None:
        """Called on every rank before the first step, with the length of the training. Does nothing
        unless overridden."""

    @abstractmethod
    def due(self, progress: Progress) -> bool:
        """Whether to write a checkpoint now. Raises CheckpointError if the save before failed."""

    @abstractmethod
    def save(self, progress: Progress) -> None:
        """Save the engine's whole state (collective). May return before it is on disk, and before
        the engine may change if that waits by itself (`Engine.before_change`). If the newest
        checkpoint is of this step, its state is the same, and only the progress is written. Raises
        CheckpointError when it, or the save before it, fails.
        """

    @abstractmethod
    def finish(self) -> str:
        """Wait until everything that was saved is on disk (collective); the address of the newest
        checkpoint. Raises CheckpointError when a save has failed."""

    def written(self) -> Sequence[WrittenCheckpoint]:
        """Checkpoints that are known to have come on disk since the last call, oldest first. Empty
        on ranks above 0."""
        return ()

    @abstractmethod
    def restore(self, validate: Callable[[Progress], None]) -> Progress | None:
        """Load the newest complete checkpoint into the engine (collective); None if there is none.
        Can be called again in the middle of a training, to go back.

        `validate` gets the checkpoint's progress before anything is loaded, and raises if it must
        not be continued. Raises CheckpointError if the checkpoint cannot be loaded.
        """

    def resource_needs(self, length: TrainingLength) -> Iterator[ResourceNeed]:
        """Resource needs of the checkpoints of a training of that length; called only on rank 0,
        before the first step."""
        return iter(())

    def best(self) -> TrainedRun:
        """The checkpoint with the lowest held-out loss, once `finish` has returned (collective).
        Raises CheckpointError when there is none."""
        raise CheckpointError("these checkpoints do not record which one is the best")

    def close(self) -> None:
        """Release what they hold, at the end of the run or after a failure. Does nothing unless
        overridden."""


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
