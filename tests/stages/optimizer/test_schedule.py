"""Learning-rate schedules, against known points and against transformers'."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import optimization

from pipeline import testing
from stages.optimizer.adamw import AdamW
from stages.optimizer.lion import Lion
from stages.optimizer.schedule import Schedule, lr_scale, steps_in

SCHEDULES = get_args(Schedule)
TO_THE_END = {"linear", "cosine", "polynomial", "wsd"}


def values(schedule: Any, total: int = 6, warmup: int = 2, **more: Any) -> list[float]:
    final = more.pop("final_scale", 0.2)
    return [
        lr_scale(s, total, schedule=schedule, warmup=warmup, final_scale=final, **more)
        for s in range(total)
    ]


def test_schedules_at_known_points() -> None:
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    assert values("constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert values("linear") == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert values("cosine") == pytest.approx(
        [0.5, 1.0, 0.2 + 0.8 * quarter, 0.6, 0.2 + 0.8 * (1 - quarter), 0.2]
    )
    assert values("polynomial", power=2.0) == pytest.approx([0.5, 1.0, 0.65, 0.4, 0.25, 0.2])
    assert values("wsd", decay=2) == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.6, 0.2])
    assert values("inverse_sqrt") == pytest.approx(
        [0.5, 1.0, *(math.sqrt(2 / step) for step in (3, 4, 5, 6))]
    )


def rates(make: Callable[..., Any], total: int, **fields: Any) -> list[float]:
    """Of the steps 1 to `total` of a transformers schedule, whose step 0 has rate 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, **fields)
    found = []
    for _ in range(total):
        optimizer.step()
        scheduler.step()
        found.append(float(scheduler.get_last_lr()[0]))
    return found


def test_schedules_are_those_of_transformers() -> None:
    own = functools.partial(values, total=40, warmup=5)
    assert own("inverse_sqrt") == pytest.approx(
        rates(optimization.get_inverse_sqrt_schedule, 40, num_warmup_steps=5)
    )
    polynomial = functools.partial(
        optimization.get_polynomial_decay_schedule_with_warmup, num_warmup_steps=5, lr_end=0.2
    )
    assert own("polynomial", power=3.0) == pytest.approx(
        rates(polynomial, 40, num_training_steps=40, power=3.0)
    )
    wsd = functools.partial(optimization.get_wsd_schedule, num_warmup_steps=5)
    assert own("wsd", decay=10, final_scale=0.0) == pytest.approx(
        rates(wsd, 40, num_stable_steps=25, num_decay_steps=10, decay_type="linear")
    )


@given(
    total=st.integers(1, 300),
    warmup=st.integers(0, 400),
    final=st.floats(0, 1),
    schedule=st.sampled_from(SCHEDULES),
    decay=st.integers(1, 300),
    power=st.floats(0.1, 5),
)
def test_schedules_stay_in_bounds_and_fall_after_warm_up(
    total: int, warmup: int, final: float, schedule: Any, decay: int, power: float
) -> None:
    found = values(schedule, total, warmup, final_scale=final, decay=decay, power=power)
    assert all(0 <= value <= 1 for value in found)
    assert found[:warmup] == sorted(found[:warmup])
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    if schedule in TO_THE_END and total > warmup:
        assert found[-1] == pytest.approx(final, abs=1e-9)


def test_fractions_of_all_steps_are_rounded_up() -> None:
    assert [steps_in(*case) for case in ((0.1, 40), (0.1, 41), (0.07, 100))] == [4, 5, 7]


NO_RATE = (
    "the learning rate is 0 at every step: the schedule {} falls to 0 at the last of 1; "
    "set schedule: constant, or final_lr_ratio"
)
RISES = (
    "warm-up takes {} steps and the training {}: the learning rate rises to the end; set a lower {}"
)


@pytest.mark.parametrize(
    ("fields", "total", "told"),
    [
        *(({"schedule": name}, 1, [NO_RATE.format(name)]) for name in sorted(TO_THE_END)),
        *(({"schedule": name}, 2, []) for name in SCHEDULES),
        ({"schedule": "constant"}, 1, []),
        ({"final_lr_ratio": 0.1}, 1, []),
        ({"warmup_steps": 5}, 6, []),
        ({"warmup_steps": 5}, 5, [RISES.format(5, 5, "warmup_steps")]),
        ({"warmup_steps": 5}, 1, [RISES.format(5, 1, "warmup_steps")]),
        ({"warmup_ratio": 0.9}, 3, [RISES.format(3, 3, "warmup_ratio")]),
        ({"warmup_ratio": 0.9}, 1, []),
    ],
)
@pytest.mark.parametrize("stage", [AdamW, Lion])
def test_rates_that_are_hardly_meant_are_told(
    stage: Any, fields: Any, total: int, told: list[str], tmp_path: Path
) -> None:
    plan = stage(**fields).run(testing.context(tmp_path))
    assert list(plan.doubts(total)) == told


def test_the_stage_passes_its_fields_on() -> None:
    wsd = AdamW(schedule="wsd", decay_ratio=0.5, final_lr_ratio=0.2)
    assert [wsd.lr_scale(step, 4) for step in range(4)] == pytest.approx([1.0, 1.0, 0.6, 0.2])
    a_tenth = AdamW(schedule="wsd")
    assert [a_tenth.lr_scale(step, 20) for step in (17, 18, 19)] == pytest.approx([1.0, 0.5, 0.0])
    assert AdamW(schedule="polynomial").lr_scale(4, 10) == pytest.approx(0.25)
    assert AdamW(schedule="polynomial", power=3.0).lr_scale(4, 10) == pytest.approx(0.125)
