"""Callbacks of a training: plugins' code that a train stage calls after every update."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.contracts.training import Progress
from pipeline.errors import StageError

if TYPE_CHECKING:
    from pipeline.distributed.process_group import DistContext


class StepCallback(ABC):
    """Code of a plugin that a train stage calls after every update, such as a metrics sink.

    A stage in a slot before the train slot returns it. It is called on every rank, in the thread
    that trains, and may use collectives. It does not change `progress`. An exception fails the
    run; `reason_to_end` ends the training well."""

    @abstractmethod
    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        """Called after update number `step` (from 1), before an evaluation and a checkpoint of this
        step; not for steps that were dropped as anomalous. Where neither comes next, the weights
        may already have the next update; `progress` is as of `step`. `record` has the numbers that
        `metrics.jsonl` has of the step (docs/training.md): `loss` and speeds over all ranks, `time`
        and `step_seconds` of this rank; NaN if unknown."""

    def on_evaluation(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        """Called after an evaluation of the weights of `step` (0: before the first update), with
        the held-out `eval_loss` and `perplexity` over all ranks. Does nothing unless overridden."""

    def reason_to_end(self) -> str:
        """Return why training should end now, in words; empty, as by default, to continue.

        Called on every rank before each step, also before the first. One rank's reason is enough:
        all ranks end after the same step, and the run continues with a save and with later slots. A
        step that was launched before the numbers of the last one were known still counts: `on_step`
        and `on_evaluation` are called for it, but no one is asked again."""
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

    A stage that adds a callback to the callbacks of earlier slots takes `earlier: StepCallback |
    None` and returns `Callbacks(earlier, its_own)`. States are kept by class name, numbered from
    the second callback of a class on: a resume with other callbacks restores each one's own."""

    def __init__(self, *callbacks: StepCallback | None) -> None:
        """Raises StageError for what is not a StepCallback."""
        self._callbacks: dict[str, StepCallback] = {}
        self._reasons: dict[str, str] = {}
        """Callback -> its reason to end the training, the same on all ranks."""
        for given in callbacks:
            several: Iterable[object] = [given]
            if isinstance(given, Callbacks):
                several = given._callbacks.values()
            for callback in several:
                if callback is None:
                    continue
                kind = type(callback)
                name = f"{kind.__module__}:{kind.__qualname__}"
                if not isinstance(callback, StepCallback):
                    hint = f"derive {kind.__qualname__} from StepCallback"
                    raise StageError(f"{name} is not a callback", hint=hint)
                number = sum(other.partition("#")[0] == name for other in self._callbacks)
                self._callbacks[f"{name}#{number + 1}" if number else name] = callback

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        for callback in self._callbacks.values():
            callback.on_step(step, progress, record)

    def on_evaluation(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        for callback in self._callbacks.values():
            callback.on_evaluation(step, progress, record)

    def reason_to_end(self) -> str:
        """The first reason that was agreed on or, before that, of a callback of this rank."""
        return next(iter((self._reasons or self._own_reasons()).values()), "")

    def _own_reasons(self) -> dict[str, str]:
        """Callback -> its reason on this rank, if it has one. Raises StageError."""
        found: dict[str, str] = {}
        for name, callback in self._callbacks.items():
            reason: object = callback.reason_to_end()
            if not isinstance(reason, str):
                why = f"the callback {name} returned {reason!r} as its reason to end"
                hint = "return a sentence, or an empty text to continue"
                raise StageError(f"{why}, which is not a text", hint=hint)
            found |= {name: reason} if reason else {}
        return found

    def agree_to_end(self, dist: DistContext) -> str:
        """Ask the callbacks that can end the training, and return the reason of the first rank that
        has one, the same on all ranks (collective); empty if training continues."""
        default = StepCallback.reason_to_end
        can_end = any(type(one).reason_to_end is not default for one in self._callbacks.values())
        if can_end and not self._reasons:
            own = self._own_reasons()
            if dist.any(bool(own)):  # the reasons themselves are only sent at the end
                self._reasons = next(reasons for reasons in dist.gather(own) if reasons)
        return next(iter(self._reasons.values()), "")

    def state(self) -> dict[str, Any]:
        """Non-empty states by the names of callbacks, and reasons of callbacks without a state.
        Raises StageError for a state that is not JSON."""
        kept: dict[str, Any] = {}
        for name, callback in self._callbacks.items():
            state: object = callback.state()
            whose = f"the state of the callback {name}"
            if not isinstance(state, Mapping):
                kind = type(state).__name__
                raise StageError(f"{whose} is a {kind}", hint="`state` returns a mapping")
            if odd := _not_json(dict(state)):
                hint = "return lists, finite numbers and texts"
                raise StageError(f"{whose} is not JSON: {odd}", hint=hint)
            kept |= {name: dict(state)} if state else {}
        reasons = {name: why for name, why in self._reasons.items() if name not in kept}
        return {**kept, **({REASONS: reasons} if reasons else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give each callback its state. A callback that keeps a state decides by it whether the
        training is still over, possibly under other settings; the reason of one without a state
        stands for as long as the recipe has the callback."""
        reasons = state.get(REASONS, {})
        self._reasons = {name: why for name, why in reasons.items() if name in self._callbacks}
        for name, callback in self._callbacks.items():
            if name in state:
                callback.restore(state[name])


REASONS = "reasons to end"
"""Key of reasons in the state of callbacks, which is not a class's name."""


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
