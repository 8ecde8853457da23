from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pipeline.forecast.ledger import Ledger
from pipeline.forecast.tape import ACTIVATIONS, Tape, Value

events = st.lists(
    st.one_of(
        st.tuples(st.just("phase"), st.sampled_from("ab")),
        st.tuples(
            st.sampled_from(["x", "y"]), st.sampled_from(["device", "host"]), st.integers(-9, 20)
        ),
    ),
    max_size=30,
)


@given(events)
def test_peaks_are_the_largest_sums_within_a_phase(story: list[Any]) -> None:
    ledger, now, best = Ledger(), 0, {"start": 0}
    ledger.phase(phase := "start")
    for event in story:
        if event[0] == "phase":
            ledger.phase(phase := event[1])
            best.setdefault(phase, now)
        else:
            item, place, amount = event
            ledger.change(item, amount, place)
            now += amount if place == "device" else 0
        best[phase] = max(best[phase], now)
    peaks = ledger.peaks("device")
    assert {name: peak.bytes for name, peak in peaks.items()} == best
    for peak in peaks.values():
        assert sum(peak.items.values()) == peak.bytes
    assert sum(ledger.held("device").values()) == now


def test_what_is_there_before_the_first_phase_counts() -> None:
    ledger = Ledger()
    ledger.change("early", 5)
    ledger.phase("a")
    ledger.change("late", 2)
    assert ledger.peaks("device")["a"].items == {"early": 5, "late": 2}


def test_a_pulse_counts_in_the_peak_alone() -> None:
    ledger = Ledger()
    ledger.phase("a")
    ledger.change("kept", 3)
    ledger.pulse("brief", 4)
    assert ledger.peaks("device")["a"].items == {"kept": 3, "brief": 4}
    assert ledger.held() == {"kept": 3}


def test_saved_tensors_live_until_their_operation_has_run_backward() -> None:
    ledger = Ledger()
    tape = Tape(ledger)
    x = tape.make(10)
    y = tape.make(20)

    def back(upstream: Value) -> list[tuple[Value, Value | None]]:
        return [(x, tape.make(10, "gradient"))]

    tape.node(y, [x], back)
    tape.drop(x)
    assert ledger.now(ACTIVATIONS) == 30  # x is kept for backward
    tape.accumulate(y, tape.make(20, "gradient"))
    tape.drop(y)
    tape.run_back()
    assert ledger.held() == {"gradient": 10}
    assert x.gradient is not None


def test_what_takes_its_gradient_may_let_it_go() -> None:
    for takes, most in ((True, 40), (False, 50)):
        tape = Tape(Ledger())
        tape.ledger.phase("backward")
        y = tape.make(10)

        def back(upstream: Value, tape: Tape = tape, takes: bool = takes) -> list[Any]:
            tape.drop(upstream if takes else None)
            tape.pulse(30)
            return []

        tape.node(y, [], back, takes=takes)
        tape.accumulate(y, tape.make(10, "gradient"))
        tape.run_back()
        assert tape.ledger.peaks("device")["backward"].bytes == most
        assert tape.ledger.held() == {ACTIVATIONS: 10}


def test_two_gradients_of_one_tensor_are_added() -> None:
    ledger = Ledger()
    tape = Tape(ledger)
    x = tape.make(10)
    tape.accumulate(x, tape.make(10, "gradient"))
    tape.accumulate(x, tape.make(10, "gradient"))
    assert ledger.peaks("device") == {}
    assert sum(ledger.held().values()) == 20


def test_nothing_is_saved_where_nothing_is_recorded() -> None:
    tape = Tape(Ledger())
    tape.recording = False
    x, y = tape.make(10), tape.make(20)
    tape.node(y, [x], lambda upstream: [])
    tape.drop(x, y)
    assert tape.ledger.held() == {}
    assert tape.mark() == 0
