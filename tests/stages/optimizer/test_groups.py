"""Parameters with their own learning rate and weight decay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from pipeline import testing
from pipeline.contracts.optimizer import NamedParameter
from pipeline.errors import StageError
from stages.optimizer.adamw import AdamW
from stages.optimizer.settings import GroupSettings, make_groups
from tests.support.models import filled, random_source, tiny_llama_config
from tests.support.optimizers import made_of

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
