"""Learning-rate schedules, against transformers', and parameters with their own rates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import optimization

from pipeline import testing
from pipeline.contracts.optimizer import NamedParameter, OptimizerPlan
from pipeline.contracts.stage import Context
from pipeline.errors import StageError
from stages.optimizer import (
    GroupSettings,
    Lion,
    OptimizerSettings,
    Schedule,
    Shape,
    make_groups,
    steps_in,
)
from stages.optimizer.adamw import AdamW
from tests.support.models import filled, random_source, tiny_llama_config
from tests.support.optimizers import made_of

SCHEDULES = get_args(Schedule)
TO_THE_END = {"linear", "cosine", "polynomial", "wsd"}


def values(schedule: Any, total: int = 6, warmup: int = 2, **more: Any) -> list[float]:
    stage = AdamW(**{"schedule": schedule, "warmup_steps": warmup, "final_lr_ratio": 0.2, **more})
    return [stage.lr_scale(step, total) for step in range(total)]


def test_schedules_at_known_points() -> None:
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    assert values("constant") == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert values("linear") == pytest.approx([0.0, 0.5, 1.0, 0.8, 0.6, 0.4])
    assert values("cosine") == pytest.approx(
        [0.0, 0.5, 1.0, 0.2 + 0.8 * quarter, 0.6, 0.2 + 0.8 * (1 - quarter)]
    )
    assert values("polynomial", power=2.0) == pytest.approx([0.0, 0.5, 1.0, 0.65, 0.4, 0.25])
    assert values("wsd", decay_steps=2) == pytest.approx([0.2, 0.6, 1.0, 1.0, 1.0, 0.6])
    assert values("inverse_sqrt") == pytest.approx(
        [0.0, 0.5, 1.0, *(math.sqrt(2 / step) for step in (3, 4, 5))]
    )


def theirs(name: str, total: int, warmup: int, **fields: Any) -> list[float]:
    """Return the rate of each step under transformers' schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    made: Any = optimization.get_scheduler(
        name, optimizer, warmup, total, scheduler_specific_kwargs=fields
    )
    return [made.lr_lambdas[0](step) for step in range(total)]


FALLS = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}
"""Our shape of a fall -> transformers'."""


@given(
    data=st.data(),
    total=st.integers(1, 400),
    final=st.just(0.0) | st.floats(0, 1),
    power=st.floats(0.1, 5),
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_update_has_the_rate_that_transformers_gives_it(
    schedule: Any, data: Any, total: int, final: float, power: float
) -> None:
    warmup = data.draw(st.integers(0, total - 1))  # it divides by the steps that are left
    decay = data.draw(st.integers(1, total - warmup))
    shape = data.draw(st.sampled_from(get_args(Shape)))
    name, ours, fields = {
        "constant": ("constant_with_warmup", {}, {}),
        "linear": ("linear", {"final_lr_ratio": 0.0}, {}),
        "cosine": ("cosine_with_min_lr", {}, {"min_lr_rate": final}),
        "polynomial": ("polynomial", {"power": power}, {"lr_end": final, "power": power}),
        "inverse_sqrt": ("inverse_sqrt", {}, {}),
        "wsd": (
            "warmup_stable_decay",
            {"decay_steps": decay, "decay_shape": shape},
            {"num_decay_steps": decay, "decay_type": FALLS[shape], "min_lr_ratio": final},
        ),
    }[schedule]
    if schedule == "polynomial" and final == 1:
        return  # transformers refuses an end that is not lower
    found = values(schedule, total, warmup, **{"final_lr_ratio": final, **ours})
    assert found == pytest.approx(theirs(name, total, warmup, **fields), abs=1e-12)


def test_where_schedules_differ_from_transformers() -> None:
    """docs/dev/optimizers.md lists these."""
    linear = values("linear", 4, 0, final_lr_ratio=0.2)
    assert linear == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert values("polynomial", 2, 0, final_lr_ratio=0.0) == pytest.approx([1.0, 0.25])
    assert theirs("polynomial", 2, 0) == pytest.approx([1.0, 0.5])
    long = {"final_lr_ratio": 0.0, "decay_steps": 4}
    assert values("wsd", 4, 2, **long) == pytest.approx([0.0, 0.5, 1.0, 0.5])
    found = theirs("warmup_stable_decay", 4, 2, num_decay_steps=4, decay_type="linear")
    assert found == pytest.approx([0.0, 0.5, 0.5, 0.25])
    assert [steps_in(*case) for case in ((0.1, 40), (0.1, 41), (0.07, 100))] == [4, 5, 7]
    assert math.ceil(0.07 * 100) == 8


@given(
    total=st.integers(1, 300),
    warmup=st.integers(0, 400),
    final=st.floats(0, 1),
    schedule=st.sampled_from(SCHEDULES),
    decay=st.integers(1, 300),
    shape=st.sampled_from(get_args(Shape)),
    power=st.floats(0.1, 5),
)
def test_schedules_stay_in_bounds_and_fall_after_warm_up(
    total: int, warmup: int, final: float, schedule: Any, decay: int, shape: Any, power: float
) -> None:
    fields = {"decay_steps": decay, "power": power} | (
        {"decay_shape": shape} if schedule == "wsd" else {}
    )
    found = values(schedule, total, warmup, final_lr_ratio=final, **fields)
    assert all(0 <= value <= 1 for value in found)
    assert found[:warmup] == sorted(found[:warmup])
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    if schedule in TO_THE_END and total > warmup:
        stage = AdamW(schedule=schedule, warmup_steps=warmup, final_lr_ratio=final, **fields)
        assert stage.lr_scale(total, total) == pytest.approx(final, abs=1e-9)


WARNING = (
    "warm-up begins with a learning rate of 0 and takes {} steps, and the training {}; set a lower "
    "warmup_steps or warmup_ratio"
)


@pytest.mark.parametrize(
    ("fields", "total", "told"),
    [
        *(({"schedule": name}, 1, []) for name in SCHEDULES),
        ({"warmup_steps": 5}, 6, []),
        ({"warmup_steps": 5}, 5, [WARNING.format(5, 5)]),
        ({"warmup_ratio": 0.9}, 1, [WARNING.format(1, 1)]),
    ],
)
@pytest.mark.parametrize("stage", [AdamW, Lion])
def test_rates_that_are_hardly_meant_are_told(
    stage: Any, fields: Any, total: int, told: list[str], tmp_path: Path
) -> None:
    plan = stage(**fields).run(testing.context(tmp_path))
    assert list(plan.schedule_warnings(total)) == told


def test_the_stage_passes_its_fields_on() -> None:
    def rates(*steps: int, total: int, **fields: Any) -> list[float]:
        stage = AdamW(**fields)
        return [stage.lr_scale(step, total) for step in steps]

    wsd = {"schedule": "wsd", "final_lr_ratio": 0.2}
    for half in ({"decay_ratio": 0.5}, {"decay_steps": 2}):
        assert rates(1, 2, 3, total=4, **wsd, **half) == pytest.approx([1.0, 1.0, 0.6])
    a_tenth = rates(18, 19, total=20, schedule="wsd", decay_shape="sqrt")
    assert a_tenth == pytest.approx([1.0, 1 - math.sqrt(0.5)])
    assert rates(5, total=10, schedule="polynomial") == pytest.approx([0.25])
    assert rates(5, total=10, schedule="polynomial", power=3.0) == pytest.approx([0.125])


@dataclass(frozen=True, kw_only=True)
class Sgd(OptimizerSettings):
    """SGD with momentum."""

    momentum: float = 0.9

    def run(self, ctx: Context) -> OptimizerPlan:
        from torch.optim import SGD

        kept = ("momentum_buffer",)
        return self.plan(SGD, moments=kept, counts_updates=False, momentum=self.momentum)


def test_a_stage_of_a_third_party_has_schedule_and_groups(tmp_path: Path) -> None:
    (problem,) = testing.problems(Sgd, {"lr": 0.1, "power": 2.0})
    assert problem.key == "power"
    groups = (GroupSettings(match=("head",), lr_ratio=2.0),)
    stage = Sgd(lr=0.5, weight_decay=0.25, groups=groups, warmup_steps=2)
    plan = stage.run(testing.context(tmp_path))
    assert (plan.rules, plan.lr_scales(1, 9)) == ([("sgd", True)], [0.5])
    assert plan.parts[0].hyperparameters == {"lr": 0.5, "weight_decay": 0.25, "momentum": 0.9}
    weight, head = (torch.nn.Parameter(torch.ones(1, 1)) for _ in range(2))
    named = [NamedParameter("weight", weight, (1, 1)), NamedParameter("head", head, (1, 1))]
    optimizer = made_of(plan, named)
    weight.grad, head.grad = torch.ones(1, 1), torch.ones(1, 1)
    optimizer.step()
    assert (weight.item(), head.item()) == (1 - 0.5 * 1.25, 1 - 1.0 * 1.25)


SHAPES = {
    "embed.weight": (4, 2), "layer.lora_A.weight": (2, 2), "layer.lora_B.weight": (2, 2),
    "layer.norm.weight": (2,), "head.weight": (4, 2), "head.bias": (4,),
}  # fmt: skip
NAMED = [NamedParameter(n, nn.Parameter(torch.ones(s)), s) for n, s in SHAPES.items()]
NAMES = {parameter: name for name, parameter, *_ in NAMED}


def told(stage: AdamW) -> list[tuple[float | None, float, list[str]]]:
    groups = make_groups(stage, NAMED)
    return [(g.get("lr"), g["weight_decay"], [NAMES[p] for p in g["params"]]) for g in groups]


def test_groups_have_rates_and_decays_of_their_own() -> None:
    stage = AdamW(
        lr=1e-3,
        weight_decay=0.1,
        groups=(
            GroupSettings(match=("*.lora_B.*",), lr_ratio=16.0),
            GroupSettings(match=("embed.*", "head.*"), weight_decay=0.0, lr_ratio=0.5),
            GroupSettings(match=("*.weight",), weight_decay=0.3),
        ),
    )
    assert told(stage) == [
        (pytest.approx(16e-3), 0.1, ["layer.lora_B.weight"]),
        (pytest.approx(5e-4), 0.0, ["embed.weight", "head.weight", "head.bias"]),
        (pytest.approx(1e-3), 0.3, ["layer.lora_A.weight", "layer.norm.weight"]),
    ]


def test_a_group_without_a_decay_decays_as_all_others() -> None:
    stage = AdamW(weight_decay=0.1, groups=(GroupSettings(match=("head.*",), lr_ratio=2.0),))
    assert [(decay, names) for _, decay, names in told(stage)] == [
        (0.1, ["head.weight"]),
        (0.0, ["head.bias"]),
        (0.1, ["embed.weight", "layer.lora_A.weight", "layer.lora_B.weight"]),
        (0.0, ["layer.norm.weight"]),
    ]


@pytest.mark.parametrize("match", [("lora_C",), ("*", "*.lora_C.*"), ("head.w*",)])
def test_a_pattern_that_adds_nothing_to_its_group_is_an_error(match: Any) -> None:
    stage = AdamW(groups=(GroupSettings(match=("head.*",)), GroupSettings(match=match)))
    with pytest.raises(StageError) as caught:
        told(stage)
    assert str(caught.value) == (
        f"groups.1.match: {match[-1]!r} matches no trained parameter that is in no earlier group "
        "(such parameters have names like embed.weight, layer.lora_A.weight, layer.lora_B.weight; "
        "a tied head is part of the embedding)"
    )


@pytest.mark.parametrize("tied", [True, False])
def test_the_documented_groups_are_those_of_tied_and_untied_models(
    tied: bool, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text("utf-8")
    example = page.partition("## Groups")[2].partition("```yaml")[2].partition("```")[0]
    groups = yaml.safe_load(example)["optimizer"]["groups"]
    model = filled(random_source(tiny_llama_config(tie_word_embeddings=tied), tmp_path))
    named = [NamedParameter(n, p, tuple(p.shape)) for n, p in model.named_parameters()]
    stage = AdamW(groups=tuple(GroupSettings(**group) for group in groups))
    found = make_groups(stage, named)
    assert [(group["weight_decay"], len(group["params"])) for group in found[:2]] == [
        (0, 1),
        (0.01, 5),
    ]
    assert found[0]["params"] == [model.model.embed_tokens.weight]


def test_an_update_uses_the_groups_rate(tmp_path: Path) -> None:
    slow, fast = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    stage = AdamW(lr=0.01, weight_decay=0.0, groups=(GroupSettings(match=("fast",), lr_ratio=3.0),))
    named = [NamedParameter("slow", slow, (2, 2)), NamedParameter("fast", fast, (2, 2))]
    plan = stage.run(testing.context(tmp_path))
    slow.grad, fast.grad = torch.ones(2, 2), torch.ones(2, 2)
    made_of(plan, named).step()
    torch.testing.assert_close(slow.detach(), torch.full((2, 2), -0.01))
    torch.testing.assert_close(fast.detach(), torch.full((2, 2), -0.03))


def test_a_class_that_takes_other_arguments_is_named() -> None:
    class SignSgd(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, momentum: float) -> None:
            raise AssertionError("never made")

    hint = r"called as SignSgd\(groups, lr=\.\.\., weight_decay=\.\.\., momentum=\.\.\.\)"
    with pytest.raises(StageError, match=rf"SignSgd: .*'weight_decay' \(it is {hint}"):
        AdamW(lr=0.1).plan(SignSgd, moments=(), momentum=0.9)
