"""Resuming from DeepSpeed's format continues exactly: the same state as never having stopped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.artifacts import LossScaling
from stages.wrap.zero import Aio, OptimizerOffload
from tests.support.processes import RankFailed, run_ranks
from tests.support.zero import Case, has_libaio, run_case

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

CPU = {"stage": 3, "offload_optimizer": OptimizerOffload()}
CASES = [
    pytest.param(Case(zero={"stage": stage}, compute=compute), id=f"{stage} {compute}")
    for stage in (1, 2, 3)
    for compute in ("fp32", "bf16")
]
# Steps enough for a power of beta to differ from the product that the CPU kernel keeps.
CASES += [
    pytest.param(Case(zero=CPU, compute=compute, last=12), id=f"3 offload {compute}")
    for compute in ("fp32", "bf16")
]


def train(folder: Path, case: Case) -> list[dict[str, Any]]:
    """What each step of rank 0 reported."""
    steps: list[dict[str, Any]] = run_ranks(run_case, 2, str(folder), case)[0]["steps"]
    return steps


def assert_continues_exactly(case: Case, folder: Path) -> None:
    whole = train(folder / "whole", case)
    half = case.last // 2
    first = train(folder / "halves", dataclasses.replace(case, last=half, save=True))
    assert (folder / f"halves/checkpoints/step-{half:08d}/progress.json").is_file()
    second = train(folder / "halves", dataclasses.replace(case, first=half))
    assert first + second == whole
    resumed = load_file(folder / "halves/masters.safetensors")
    for name, weight in load_file(folder / "whole/masters.safetensors").items():
        assert torch.equal(resumed[name], weight), name


@pytest.mark.parametrize("case", CASES)
def test_continuation_is_bit_identical(case: Case, tmp_path: Path) -> None:
    assert_continues_exactly(case, tmp_path)


def test_loss_scaling_continues(tmp_path: Path) -> None:
    scaling = LossScaling(initial_scale=1024.0, growth_interval=2)
    case = Case(zero={"stage": 3}, compute="fp16", loss_scaling=scaling, explode_at=1, last=6)
    assert_continues_exactly(case, tmp_path)


@pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
def test_state_on_disk_continues_exactly(tmp_path: Path) -> None:
    """Sub-groups of a megabyte are swapped, the small last ones stay in memory."""
    offload = OptimizerOffload(device="nvme", path=str(tmp_path / "swap"))
    zero = {"stage": 3, "offload_optimizer": offload, "aio": Aio(), "sub_group_size": 300_000}
    model = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    assert_continues_exactly(Case(zero=zero, model=model), tmp_path)
    saved = tmp_path / "halves/checkpoints/step-00000002/state/offloaded_tensors"
    assert len(list(saved.glob("rank0[01]/exp_avg_sq-*.swp"))) >= 2


def test_what_killed_saves_and_deletions_left_is_removed(tmp_path: Path) -> None:
    case = Case(zero={"stage": 2}, last=1, save=True)
    train(tmp_path, case)
    for name in ("step-00000007", "step-00000000"):
        (tmp_path / "checkpoints" / f"{name}.partial" / "state").mkdir(parents=True)
    train(tmp_path, dataclasses.replace(case, first=1, last=2, save=False))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_another_world_size_is_refused(tmp_path: Path) -> None:
    case = Case(zero={"stage": 2}, last=1, save=True)
    train(tmp_path, case)
    with pytest.raises(RankFailed, match=r"written by 2 processes, this run has 1"):
        run_ranks(run_case, 1, str(tmp_path), dataclasses.replace(case, first=1, last=2))
    record = json.loads((tmp_path / "checkpoints/step-00000001/progress.json").read_text())
    assert record["format"] == "deepspeed"
