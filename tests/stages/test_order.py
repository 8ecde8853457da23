"""Stages that must come before others report a wrong order."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.testing import plan_view
from stages.adapter.lora import Lora
from stages.average.ema import EmaAverage
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.train.causal_lm import TrainCausalLm
from stages.wrap.ddp import Ddp

LORA, EMA, TRAIN = Lora(), EmaAverage(), TrainCausalLm(global_batch_size=8, steps=10)
CASES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "adapter before wrap": (LORA, {"adapter": LORA, "wrap": Ddp()}, []),
    "adapter behind wrap": (
        LORA, {"wrap": Ddp(), "checkpoint": ShardedCheckpoint(), "adapter": LORA},
        ["stands after slot `wrap`, which builds the model, and changes nothing"],
    ),
    "average before checkpoint": (
        EMA, {"ema": EMA, "checkpoint": ShardedCheckpoint(), "train": TRAIN}, [],
    ),
    "average behind checkpoint": (
        EMA, {"wrap": Ddp(), "checkpoint": ShardedCheckpoint(), "ema": EMA, "train": TRAIN},
        ["the checkpoint slot comes before this one and would not save the average"],
    ),
    "in no slot": (EMA, {"checkpoint": ShardedCheckpoint()}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_slots(name: str) -> None:
    stage, slots, messages = CASES[name]
    assert [problem.message for problem in stage.check(plan_view(slots))] == messages
