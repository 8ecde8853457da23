"""The slots of a run's chain, and what has become of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["waiting", "running", "finished", "failed", "stopped"]
ENDS: Mapping[str, State] = {
    "run failed": "failed",
    "run stopped": "stopped",
    "run finished": "finished",
}
"""Events that end a start of a run -> what becomes of the slot that was running."""


@dataclass(kw_only=True)
class SlotState:
    """One slot of a run, as its journal has it."""

    slot: str
    use: str
    """Name of its stage."""
    state: State = "waiting"
    began: float = 0.0
    """Time of its newest start, in seconds since 1970; 0 before the first."""
    seconds: float = 0.0
    """Seconds that its newest finished pass took."""
    total_seconds: float = 0.0
    """Seconds of all its passes, as far as they came."""


class Chain:
    """The slots of a run in order, brought up to date event by event."""

    def __init__(self, slots: Mapping[str, str]) -> None:
        """Take slot names with the names of their stages, in order."""
        self.slots = {slot: SlotState(slot=slot, use=use) for slot, use in slots.items()}
        self.started = 0.0
        """Time of the newest start of the run, in seconds since 1970; 0 before the first."""
        self.ended = 0.0
        """Time at which that ended; 0 if it has not."""
        self._newest = 0.0

    def update(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take note of journal events. A slot that the recipe no longer has is passed over."""
        for event in events:
            kind, slot = event["event"], self.slots.get(event.get("slot", ""))
            if kind == "run started":
                self._leave("waiting", self._newest)  # that start was killed
                self.started, self.ended = event["time"], 0.0
                self._wait_again()
            elif kind in ENDS:
                self.ended = event["time"]
                self._leave(ENDS[kind], event["time"])
            elif kind == "slot set aside" and slot is not None:
                slot.state = "waiting"
            elif kind == "slot started" and slot is not None:
                slot.state, slot.began = "running", event["time"]
            elif kind == "slot finished" and slot is not None:
                slot.seconds = event.get("seconds", event["time"] - slot.began)
                slot.total_seconds += slot.seconds
                slot.state = "finished"
            self._newest = event["time"]

    def end_silently(self, now: float) -> None:
        """Note that the newest start was killed, and has lived until `now` at least."""
        if self.started and not self.ended:
            self.ended = max(self._newest, now)
            self._leave("stopped", self.ended)

    def _leave(self, state: State, now: float) -> None:
        """End the slot that is running, which has not finished."""
        for slot in self.slots.values():
            if slot.state == "running":
                slot.state = state
                slot.total_seconds += max(0.0, now - slot.began)

    def _wait_again(self) -> None:
        """Have the slots wait that an earlier start did not finish."""
        for slot in self.slots.values():
            if slot.state in ("failed", "stopped"):
                slot.state = "waiting"

    @property
    def running(self) -> SlotState | None:
        """The slot that is running, if one is."""
        return next((slot for slot in self.slots.values() if slot.state == "running"), None)
