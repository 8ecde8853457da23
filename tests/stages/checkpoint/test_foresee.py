"""Stages use exactly the space that they forecast."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.export.safetensors import ExportSafetensors
from stages.train.causal_lm import TrainCausalLm
from tests.support.exports import Run, run_of
from tests.support.models import FAMILIES, context
from tests.support.processes import run_ranks
from tests.support.runs import context as run_context
from tests.support.runs import toy_data
from tests.support.state import Setting, make_engine


def sizes(dist: DistContext, folder: str) -> list[int]:
    """Return forecasts (at first, with one checkpoint there, keeping all), and the size of that
    checkpoint, in bytes."""
    ctx = run_context(dist, folder)
    engine = make_engine(ctx, Setting(wrap="ddp"))
    stage = ShardedCheckpoint(every=1, keep=2, keep_best=1, asynchronous=False)
    checkpoints = stage.run(ctx, engine)
    train = TrainCausalLm(global_batch_size=4, epochs=0.5, eval_every=2)  # 5 steps
    data = toy_data(40)
    asked = [sum(room.disk for room in train.resource_needs(ctx, data, checkpoints))]
    checkpoints.save(Progress(step=1))
    place = Path(checkpoints.finish())
    asked.append(sum(room.disk for room in train.resource_needs(ctx, data, checkpoints)))
    checkpoints.close()  # type: ignore[attr-defined]
    keeps_all = replace(stage, keep=None, keep_best=0).run(ctx, engine)
    asked.append(sum(room.disk for room in train.resource_needs(ctx, data, keeps_all)))
    keeps_all.close()  # type: ignore[attr-defined]
    return [*asked, sum(file.stat().st_size for file in place.glob("*.safetensors"))]


def test_checkpoints(tmp_path: Path) -> None:
    ((first, second, all_five, real),) = run_ranks(sizes, 1, str(tmp_path))
    assert first == 4 * real  # two, the best, and the one that is being written
    assert second == 3 * real
    assert all_five == 4 * real  # without the existing one


@pytest.mark.parametrize("family", ["llama", "llama_tied", "mixtral"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export(family: str, dtype: str, tmp_path: Path) -> None:
    run = run_of(FAMILIES[family], tmp_path)
    stage = ExportSafetensors(folder=str(run.folder), dtype=dtype)  # type: ignore[arg-type]
    (room,) = stage.resource_needs(context(tmp_path), run.source)
    assert room.folder == run.folder
    elements = sum(tensor.numel() for tensor in _unique(run, tied=family == "llama_tied"))
    assert room.disk == elements * (4 if dtype == "fp32" else 2)


def _unique(run: Run, *, tied: bool) -> list[Tensor]:
    return [t for name, t in run.weights.tensors.items() if not (tied and name == "lm_head.weight")]


def starved(dist: DistContext, folder: str) -> str:
    """Return the message when host memory has no room for a copy of the state."""
    ctx = run_context(dist, folder)
    engine = make_engine(ctx, Setting(wrap="ddp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.contracts.stage.free_memory", lambda: 1000)
        with pytest.raises(StageError) as error:
            ShardedCheckpoint().run(ctx, engine)
    return str(error.value)


def test_no_memory_for_the_snapshot(tmp_path: Path) -> None:
    (said,) = run_ranks(starved, 1, str(tmp_path))
    assert re.search(r"not enough host memory: .* for copies of the training state", said)
    assert "1.0 KB available" in said
