"""Slots whose types fit, but one lacks or cannot read something that the other needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from pipeline.contracts.stage import Context
from pipeline.contracts.training import Checkpoints
from pipeline.testing import plan_view, problems
from stages.checkpoint.sharded import FullCheckpoint, ShardedCheckpoint
from stages.consolidate.stream import ConsolidateStream
from stages.data.stages import ChatData, StreamData, TextData
from stages.hf.trainer import HfTrainer
from stages.train.causal_lm import TrainCausalLm


@dataclass(frozen=True, kw_only=True)
class Own:
    """A checkpoint stage from elsewhere."""

    def run(self, ctx: Context) -> Checkpoints: ...


@dataclass(frozen=True, kw_only=True)
class Elsewhere(Own):
    """A checkpoint stage whose format is in no package."""

    format: ClassVar[str] = "elsewhere"


@pytest.mark.parametrize(
    ("saving", "found"),
    [
        (ShardedCheckpoint(), []),
        (FullCheckpoint(), []),
        (Own(), ["Own's checkpoints cannot be read: the stage names no `format`"]),
        (Elsewhere(), ["Elsewhere's checkpoints cannot be read: there is no format `elsewhere`"]),
    ],
)
def test_checkpoints_are_in_a_format_that_can_be_read(saving: Any, found: list[str]) -> None:
    train = TrainCausalLm(global_batch_size=8, steps=10)
    view = plan_view({"checkpoint": saving, "train": train})
    assert [one.message for one in problems(ConsolidateStream, {}, plan=view)] == found


FILES = {"files": ("train.txt",)}


@pytest.mark.parametrize(
    ("data", "held"),
    [
        (TextData(**FILES), False),
        (TextData(**FILES, heldout_fraction=0.1), True),
        (ChatData(**FILES, heldout_files=("held.jsonl",)), True),
        (StreamData(shards=("a.txt",)), False),
        (StreamData(shards=("a.txt",), heldout_files=("held.txt",)), True),
        (Own(), True),  # no data slot, or one with its own mistakes
    ],
)
@pytest.mark.parametrize(
    ("stage", "fields"),
    [
        (TrainCausalLm, {"eval_every": 5}),
        (TrainCausalLm, {"eval_first": True}),
        (TrainCausalLm, {"eval_every": 5, "early_stopping": {"patience": 2}}),
        (HfTrainer, {"eval_every": 5}),
    ],
)
def test_what_evaluates_has_samples(
    data: Any, held: bool, stage: type, fields: dict[str, Any]
) -> None:
    slot = {"global_batch_size": 8, "steps": 10, **fields}
    told = problems(stage, slot, plan=plan_view({"data": data}))
    wrong = [one.key for one in told if one.message.startswith("needs held-out samples")]
    assert wrong == ([] if held else list(fields))
    assert problems(stage, {"global_batch_size": 8, "steps": 10}, plan=plan_view({})) == []
