"""What train.hf_trainer is said to take, beside tensors of real trainings on CPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.artifacts import Data, Sample
from pipeline.dist import Dist
from pipeline.plan import plan_file
from pipeline.planning.estimate import Estimate
from pipeline.planning.memory_plan import estimated
from pipeline.planning.planner import Topology
from pipeline.planning.trace.traced import tops_of
from pipeline.planning.trace.tracker import MemoryTracker
from stages.model.hf import HfModel
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.hf_trainer import HfTrainer
from stages.train.planner import HfTrainerPlanner
from tests.support.processes import run_ranks
from tests.support.runs import ListedSamples, context
from tests.support.tiny_recipe import write

LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "vocab_size": 3000,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4,
}  # fmt: skip
N = 2 * 3000 * 128 + 4 * (2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 352 + 2 * 128) + 128


def metered(dist: Dist, folder: str, fields: dict[str, Any]) -> int:
    """The most bytes of tensors of this rank while the stage runs."""
    if dist.world_size == 1:  # as `pipe run` starts one process
        del os.environ["LOCAL_RANK"]
    ctx = context(dist, folder)
    samples = ListedSamples(32 * [Sample(input_ids=np.arange(128), labels=np.arange(128))])
    data = Data(train=samples, heldout=None, pad_id=0, identity={})
    plan, precision = AdamW().run(ctx), PrecisionPolicy(compute="bf16").run(ctx)
    with MemoryTracker(fake=False) as tracker:
        model = HfModel(config=LLAMA, init="random").run(ctx)
        HfTrainer(steps=2, global_batch_size=8, **fields).run(ctx, data, plan, precision, model)
    return max(tops_of(tracker.stretches).values())


def told(folder: Path, ranks: int, **fields: Any) -> Estimate:
    (folder / "text.txt").write_text("text\n", "utf-8")
    stages = {
        "model": {"use": "model.hf", "config": LLAMA},
        "precision": {"use": "precision.policy", "compute": "bf16"},
        "data": {"use": "data.text", "files": "./text.txt", "sequence_length": 128},
        "optimizer": {"use": "optimizer.adamw"},
        "train": {"use": "train.hf_trainer", "steps": 2, "global_batch_size": 8, **fields},
    }
    plan = plan_file(write(folder / "recipe.yaml", stages, procs=ranks), forecast=True)
    return estimated(plan, Topology(ranks=ranks, local_ranks=ranks, device="cuda"))


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [(1, {"micro_batch_size": 2}), (2, {"arguments": {"activation_checkpointing": True}})],
)
def test_tensors_and_files_are_as_told(ranks: int, fields: dict[str, Any], tmp_path: Path) -> None:
    estimate = told(tmp_path, ranks, **fields)
    for found in run_ranks(metered, ranks, str(tmp_path), fields):
        assert found == pytest.approx(estimate.peak, rel=0.02)
    (checkpoint,) = estimate.storage
    written = sum(file.stat().st_size for file in (tmp_path / "checkpoints/checkpoint-2").iterdir())
    assert written == pytest.approx(checkpoint.bytes, rel=0.02)


@pytest.mark.parametrize(("ranks", "each"), [(1, 16), (2, 20)])
def test_replicas_by_hand(ranks: int, each: int, tmp_path: Path) -> None:
    """16 bytes a parameter on one GPU, 20 on several, where buckets stay beside gradients."""
    estimate = told(tmp_path, ranks, arguments={"torch_compile": True})
    assert estimate.device["optimizer step"].bytes == each * N
    assert estimate.caveats[1:] == ("what torch_compile saves",)


def test_smaller_micro_batches_are_its_only_saving() -> None:
    planner = HfTrainerPlanner(HfTrainer(steps=1, global_batch_size=8))
    assert [saving.fields for saving in planner.savings(2)] == [{"micro_batch_size": 2}]
