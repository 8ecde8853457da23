"""Slots brought up to date by the events of several starts."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.execution.run_state import RunState, SlotState


def states(*events: dict[str, Any]) -> list[str]:
    """Return the states of `data`, `train` and `export` after these events, a second each."""
    state = RunState.of({"time": float(second), **event} for second, event in enumerate(events))
    slots = ("data", "train", "export")
    return [state.slots.get(slot, SlotState()).state for slot in slots]


def slot(kind: str, name: str) -> dict[str, Any]:
    return {"event": f"slot {kind}", "slot": name, "digest": "", "record": None}


RUN_STARTED = {"event": "run started"}
DATA = [RUN_STARTED, slot("started", "data"), slot("finished", "data")]
ALL = [*DATA, slot("started", "train"), slot("finished", "train"), slot("started", "export"),
       slot("finished", "export")]  # fmt: skip


@pytest.mark.parametrize("end", ["failed", "stopped"])
def test_a_new_start_has_the_slot_wait_that_did_not_finish(end: str) -> None:
    ended = [*DATA, slot("started", "train"), {"event": f"run {end}"}]
    assert states(*ended) == ["finished", end, "waiting"]
    assert states(*ended, RUN_STARTED) == ["finished", "waiting", "waiting"]
    again = [*ended, RUN_STARTED, slot("started", "data")]
    assert states(*again) == ["running", "waiting", "waiting"]


def test_a_slot_that_is_set_aside_waits() -> None:
    again = [*ALL, {"event": "run finished"}, slot("set aside", "train"), slot("set aside", "old")]
    assert states(*again) == ["finished", "waiting", "finished"]
    assert states(*again, RUN_STARTED) == ["finished", "waiting", "finished"]
