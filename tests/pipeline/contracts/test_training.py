"""Periods of a training, in steps and in parts of an epoch."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.training import Progress, TrainingLength, ends_period


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (None, None),
        (200, Fraction(200)),
        ("1 epoch", Fraction(75, 2)),
        ("0.25 epochs", Fraction(75, 8)),
        ("1/3 epochs", Fraction(25, 2)),
        ("2.5 epochs", Fraction(375, 4)),
    ],
)
def test_steps_of_a_period(every: int | str | None, steps: Fraction | None) -> None:
    assert TrainingLength(epoch=Fraction(150, 4)).in_steps(every) == steps


def test_parts_of_an_unknown_epoch_are_not_known() -> None:
    assert TrainingLength().in_steps("0.25 epochs") is None
    assert TrainingLength().in_steps(3) == 3


def test_four_times_an_epoch_of_37_and_a_half_steps() -> None:
    period = Fraction(75, 8)
    assert [step for step in range(80) if ends_period(step, period)] == [
        10, 19, 29, 38, 47, 57, 66, 75,
    ]  # fmt: skip


@given(st.fractions(min_value=Fraction(1, 9), max_value=40, max_denominator=50))
def test_periods_end_with_the_first_step_by_which_they_are_over(period: Fraction) -> None:
    found = {step for step in range(-1, 101) if ends_period(step, period)}
    assert found == {math.ceil(k * period) for k in range(1, 1000)} & {*range(101)}


@pytest.mark.parametrize(("texts", "step"), [(0, None), (4, 4)])
def test_older_checkpoints_have_one_zero_for_never_and_for_step_0(
    texts: int, step: int | None
) -> None:
    assert Progress.from_record({"step": 4, "texts": texts}).texts_step == step
    assert Progress.from_record(vars(Progress(texts_step=0))).texts_step == 0
