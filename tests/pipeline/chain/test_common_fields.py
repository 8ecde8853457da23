"""Fields that stay where the command line gives a slot another stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.chain.common_fields import common_fields
from pipeline.chain.plan import plan_file
from pipeline.chain.registry import Registry

RECIPE = Path(__file__).parents[3] / "recipes" / "smollm_fsdp.yaml"


def test_stages_of_one_kind_have_their_settings_in_common() -> None:
    common = common_fields(Registry.installed())
    both = set(common("optimizer.adamw", "optimizer.lion"))
    assert {"lr", "schedule", "warmup_ratio", "weight_decay"} <= both
    assert common("optimizer.adamw", "wrap.ddp") == []
    assert not common("optimizer.adamw", "no.such")
    assert "context_parallel" in common("wrap.fsdp", "wrap.ddp")
    assert "tensor_parallel" not in common("wrap.fsdp", "wrap.ddp")  # which ddp does not have
    assert "takes" in common("wrap.fsdp", "wrap.ddp")
    assert "takes" not in common("train.causal_lm", "train.hf_trainer")  # which take other things


@pytest.mark.parametrize("use", ["optimizer.lion", "optimizer.adamw"])
def test_the_rate_of_the_file_stays(use: str) -> None:
    before = plan_file(RECIPE, forecast=True)
    plan = plan_file(RECIPE, [f"optimizer.use={use}"], forecast=True)
    old, new = (
        next(step.stage for step in made.steps if step.slot == "optimizer")
        for made in (before, plan)
    )
    assert (new.lr, new.schedule, new.warmup_ratio) == (old.lr, old.schedule, old.warmup_ratio)
    told = [str(warning) for warning in plan.warnings if "became" in str(warning)]
    assert len(told) == (use == "optimizer.lion")
    assert all("optimizer.adamw became optimizer.lion: kept lr, " in text for text in told)
    assert "lr: " in plan.recipe.dump()  # which the ranks read
