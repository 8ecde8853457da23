"""Full tensors from every kind of DeepSpeed's own checkpoint equal the live masters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.contracts.training import Progress, TrainedRun
from pipeline.distributed.process_group import DistContext
from pipeline.errors import CheckpointError, UsageError
from stages.consolidate.stream import ConsolidateStream
from stages.wrap.zero import Aio, OptimizerOffload
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.zero import Case, has_libaio, plain, run_case

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

CASES = {
    "1": Case(zero={"stage": 1}),
    "1 bf16": Case(zero={"stage": 1}, compute="bf16"),
    "2 offload": Case(zero={"stage": 2, "offload_optimizer": OptimizerOffload()}),
    "3 bf16": Case(zero={"stage": 3}, compute="bf16"),
    "3 sub-groups": Case(zero={"stage": 3, "sub_group_size": 500}),
    "3 untied": Case(zero={"stage": 3}, model={"tie_word_embeddings": False}),
}  # fmt: skip


def consolidated(folder: Path, case: Case, *, ranks: int = 2) -> Any:
    run_ranks(run_case, ranks, str(folder), dataclasses.replace(case, save=True, last=2))
    return opened(folder / "saved")


def opened(checkpoint: Path) -> Any:
    ctx = context(DistContext(device=torch.device("cpu")), checkpoint.parent)
    trained = TrainedRun(checkpoint=str(checkpoint), progress=Progress(step=2))
    return ConsolidateStream().run(ctx, trained)


def assert_equal_to_live_masters(weights: Any, folder: Path) -> None:
    masters = load_file(folder / "masters.safetensors")
    assert masters
    for name, master in masters.items():
        assert weights.spec(name).shape == tuple(master.shape)
        assert torch.equal(weights.read(name), master), name


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_the_live_masters(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    weights = consolidated(tmp_path, case)
    assert_equal_to_live_masters(weights, tmp_path)
    tied = case.model.get("tie_word_embeddings", True)
    embedding, head = weights.read("model.embed_tokens.weight"), weights.read("lm_head.weight")
    assert torch.equal(embedding, head) == tied


def test_groups_in_round_robin_order_are_refused(tmp_path: Path) -> None:
    case = Case(zero={"stage": 2, "round_robin_gradients": True})
    with pytest.raises(CheckpointError, match="saved with round_robin_gradients"):
        consolidated(tmp_path, case)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_other_world_sizes(stage: int, ranks: int, tmp_path: Path) -> None:
    case = Case(zero={"stage": stage}, samples=6)
    assert_equal_to_live_masters(consolidated(tmp_path, case, ranks=ranks), tmp_path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_tensors_come_out_as_they_went_in(stage: int, tmp_path: Path) -> None:
    case = Case(zero={"stage": stage}, frozen="mlp")
    weights = consolidated(tmp_path, case)
    assert_equal_to_live_masters(weights, tmp_path)
    origin = plain(tmp_path, Case(zero={}, last=0))[2]
    assert set(weights.names()) == {*origin, "lm_head.weight"}
    frozen = [name for name in origin if "mlp" in name]
    assert len(frozen) == 9
    for name in frozen:
        assert torch.equal(weights.read(name), origin[name])


@pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
def test_masters_on_disk_are_refused(tmp_path: Path) -> None:
    offload = OptimizerOffload(device="nvme", path=str(tmp_path / "swap"))
    zero = {"stage": 3, "offload_optimizer": offload, "aio": Aio(), "sub_group_size": 300_000}
    model = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    with pytest.raises(CheckpointError, match="elements is stored as 0"):
        consolidated(tmp_path, Case(zero=zero, model=model))


def test_a_missing_tensor_or_folder_is_named(tmp_path: Path) -> None:
    weights = consolidated(tmp_path, Case(zero={"stage": 2}), ranks=1)
    with pytest.raises(CheckpointError, match=r"holds no tensor nothing\.weight"):
        weights.read("nothing.weight")
    with pytest.raises(UsageError, match="no such folder"):
        opened(tmp_path / "elsewhere")
