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
from tests.support.processes import in_turn, run_ranks
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
    **{f"{stage} frozen": Case(zero={"stage": stage}, frozen="mlp") for stage in (1, 2, 3)},
    **{
        f"{stage} on {ranks}": Case(zero={"stage": stage}, samples=6)
        for stage in (2, 3)
        for ranks in (1, 3)
    },
}
ROBIN = Case(zero={"stage": 2, "round_robin_gradients": True})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all cases' checkpoints and masters."""
    root = tmp_path_factory.mktemp("saved")
    cases = CASES | {"robin": ROBIN}
    if has_libaio():
        offload = OptimizerOffload(device="nvme", path=str(root / "swap"))
        zero = {"stage": 3, "offload_optimizer": offload, "aio": Aio(), "sub_group_size": 300_000}
        model = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        cases["nvme"] = Case(zero=zero, model=model)
    groups: dict[int, list[Any]] = {}
    for name, case in cases.items():
        done = dataclasses.replace(case, save=True, last=2)
        ranks = int(name.partition(" on ")[2] or 2)
        groups.setdefault(ranks, []).append((run_case, str(root / name), done))
    for ranks, calls in groups.items():
        run_ranks(in_turn, ranks, calls)
    return root


def opened(checkpoint: Path) -> Any:
    ctx = context(DistContext(device=torch.device("cpu")), checkpoint.parent)
    trained = TrainedRun(checkpoint=str(checkpoint), progress=Progress(step=2))
    return ConsolidateStream().run(ctx, trained)


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_the_live_masters(name: str, saved: Path) -> None:
    weights = opened(saved / name / "saved")
    masters = load_file(saved / name / "masters.safetensors")
    assert masters
    for key, master in masters.items():
        assert weights.spec(key).shape == tuple(master.shape)
        assert torch.equal(weights.read(key), master), key
    embedding, head = weights.read("model.embed_tokens.weight"), weights.read("lm_head.weight")
    assert torch.equal(embedding, head) == CASES[name].model.get("tie_word_embeddings", True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_tensors_come_out_as_they_went_in(stage: int, saved: Path, tmp_path: Path) -> None:
    weights = opened(saved / f"{stage} frozen/saved")
    origin = plain(tmp_path, Case(zero={}, last=0))[2]
    assert set(weights.names()) == {*origin, "lm_head.weight"}
    frozen = [name for name in origin if "mlp" in name]
    assert len(frozen) == 9
    for name in frozen:
        assert torch.equal(weights.read(name), origin[name])


def test_groups_in_round_robin_order_are_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="saved with round_robin_gradients"):
        opened(saved / "robin/saved")


@pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
def test_masters_on_disk_are_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="elements is stored as 0"):
        opened(saved / "nvme/saved")


def test_a_missing_tensor_or_folder_is_named(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tensor nothing\.weight"):
        opened(saved / "1/saved").read("nothing.weight")
    with pytest.raises(UsageError, match="no such folder"):
        opened(saved / "elsewhere")
