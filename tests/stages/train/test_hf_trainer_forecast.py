"""What train.hf_trainer is said to take, beside tensors of real trainings on CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeline.artifacts import Data, Sample
from pipeline.dist import Dist
from pipeline.plan import plan_file
from pipeline.planning.estimate import Estimate
from pipeline.planning.memory_plan import estimated
from pipeline.planning.timeline import BACKWARD, FORWARD, LOAD, UPDATE
from pipeline.planning.topology import Topology
from pipeline.planning.trace.traced import tops_of
from pipeline.planning.trace.tracker import MemoryTracker, Position
from stages.model.hf import HfModel
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.hf_trainer import HfTrainer
from stages.train.planner import HfTrainerPlanner
from tests.support.processes import run_ranks
from tests.support.runs import ListedSamples, context

LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "vocab_size": 3000,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
BLOCK = 2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 352 + 2 * 128
N = 2 * 3000 * 128 + 4 * BLOCK + 128
LENGTH = 128


def metered(dist: Dist, folder: str, fields: dict[str, Any], compute: Any) -> dict[str, int]:
    """Phase -> the most bytes of tensors of this rank while the stage runs."""
    from stages.train import hf_trainer_run

    if dist.world_size == 1:  # as `pipe run` starts one process
        del os.environ["LOCAL_RANK"]
    ctx = context(dist, folder)
    finals: list[Callable[[], object]] = []
    ctx.on_exit = finals.append
    tracker = MemoryTracker(fake=False)
    plain = hf_trainer_run.SummedLoss

    class Loss(plain):
        def __call__(self, batch: Any) -> Any:
            tracker.enter(Position(FORWARD, 0, ""))
            loss = super().__call__(batch)
            tracker.enter(Position(BACKWARD, 0, ""))
            return loss

    hf_trainer_run.SummedLoss = Loss  # type: ignore[misc]
    register_optimizer_step_pre_hook(lambda *_: tracker.enter(Position(UPDATE, 0, "")))
    ids = np.random.default_rng(0).integers(0, 3000, (32, LENGTH))
    samples = [Sample(input_ids=row, labels=row) for row in ids]
    data = Data(train=ListedSamples(samples), heldout=None, pad_id=0, identity={})
    plan, precision = AdamW().run(ctx), PrecisionPolicy(compute=compute).run(ctx)
    with tracker:
        model = HfModel(config=LLAMA, init="random").run(ctx)
        HfTrainer(steps=2, **fields).run(ctx, data, plan, precision, model)
    for call in reversed(finals):
        call()
    return {position.phase: size for position, size in tops_of(tracker.stretches).items()}


def told(
    folder: Path, fields: dict[str, Any], compute: str, ranks: int, device: str = "cpu"
) -> Estimate:
    text, file = folder / "text.txt", folder / "recipe.yaml"
    text.write_text("text\n", "utf-8")
    stages = {
        "model": {"use": "model.hf", "config": LLAMA},
        "precision": {"use": "precision.policy", "compute": compute},
        "data": {"use": "data.text", "files": str(text), "sequence_length": LENGTH},
        "optimizer": {"use": "optimizer.adamw"},
        "train": {"use": "train.hf_trainer", "steps": 2, **fields},
    }
    recipe = {"name": "r", "launch": {"procs": ranks, "device": device}, "stages": stages}
    file.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    topology = Topology(ranks=ranks, local_ranks=ranks, device=device)
    return estimated(plan_file(file, forecast=True), topology)


AGAIN = {"activation_checkpointing": True}
CASES = [
    pytest.param(1, "bf16", {"global_batch_size": 6, "micro_batch_size": 2}, id="on 1"),
    pytest.param(2, "fp32", {"global_batch_size": 4}, id="on 2"),
    pytest.param(2, "bf16", {"global_batch_size": 8, "arguments": AGAIN}, id="recomputed"),
]


@pytest.mark.parametrize(("ranks", "compute", "fields"), CASES)
def test_tensors_and_files_are_as_large_as_was_said(
    ranks: int, compute: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    estimate = told(tmp_path, fields, compute, ranks)
    peaks = {phase: held.bytes for phase, held in estimate.device.items()}
    for found in run_ranks(metered, ranks, str(tmp_path), fields, compute):
        for phase in (FORWARD, BACKWARD, UPDATE):
            assert found[phase] == pytest.approx(peaks[phase], rel=0.02), phase
        # random weights are made a tensor at a time, and gloo may let go of what it has sent only
        # when the buckets have been made
        assert 0.98 * peaks[LOAD] < found[LOAD] < peaks[LOAD] + 4.1 * N
    (checkpoint,) = estimate.storage
    assert (checkpoint.what, checkpoint.bytes) == ("1 checkpoint", 12 * N)
    written = sum(file.stat().st_size for file in (tmp_path / "checkpoints/checkpoint-2").iterdir())
    assert written == pytest.approx(checkpoint.bytes, rel=0.02)


@pytest.mark.parametrize(("ranks", "each"), [(1, 16), (2, 20)])
def test_replicas_by_hand(ranks: int, each: int, tmp_path: Path) -> None:
    """16 bytes a parameter on one GPU, 20 on several, where buckets stay beside gradients."""
    estimate = told(tmp_path, {"global_batch_size": 8}, "bf16", ranks, "cuda")
    peaks, step = estimate.device, estimate.step
    assert peaks["optimizer step"].bytes == each * N
    assert peaks["checkpoint"].bytes == (each - 4) * N
    assert (step.microbatches, step.samples, step.tokens) == (1, 8, 8 * LENGTH)
    sent = [(one.collective, one.bytes, one.ranks) for one in estimate.traffic]
    assert sent == ([("all-reduce", 4 * N, 2)] if ranks > 1 else [])
    assert estimate.host["checkpoint"].items["copy of what is saved"] == 4 * N


def test_compiled_models_are_told(tmp_path: Path) -> None:
    fields = {"global_batch_size": 8, "arguments": {"torch_compile": True}}
    assert told(tmp_path, fields, "bf16", 1).caveats == ("compiled models, which keep less",)


def test_smaller_micro_batches_are_its_only_saving() -> None:
    def savings(batch: int) -> list[Any]:
        return [*HfTrainerPlanner(HfTrainer(steps=1, global_batch_size=batch)).savings(2)]

    assert [saving.fields for saving in savings(8)] == [{"micro_batch_size": 2}]
    assert savings(2) == []
