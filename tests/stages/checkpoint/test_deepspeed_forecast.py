"""What checkpoint.deepspeed is said to take, and the files that it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.forecast.result import Extras
from pipeline.forecast.shapes import ModelShape
from pipeline.forecast.site import Site
from pipeline.length import Length
from stages.checkpoint.deepspeed import DeepSpeedCheckpoint
from stages.checkpoint.deepspeed_state import TAG
from stages.model.hf import HfModel
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.wrap.zero import OptimizerOffload, Zero
from tests.support.processes import run_ranks
from tests.support.runs import TINY
from tests.support.zero import Case, has_libaio, run_case

MODEL = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1001}
BLOCK = (256 + 2 * 128 + 256) * 256 + 3 * 256 * 512 + 2 * 256
N = 1001 * 256 + 3 * BLOCK + 256


def shape(*, frozen: str = "", borrowed: bool = False) -> ModelShape:
    site = Site(ranks=1, local_ranks=1, device="cpu")
    return (
        HfModel(config={**TINY, **MODEL})
        .forecast(site)
        .changed(
            lambda weight: (
                replace(weight, trained=False, borrowed=borrowed)
                if frozen and frozen in weight.name
                else weight
            )
        )
    )


def forecast(
    zero: dict[str, Any],
    model: ModelShape,
    *,
    compute: Any = "bf16",
    device: str = "cpu",
    ranks: int = 2,
    **fields: Any,
) -> Extras:
    site = Site(ranks=ranks, local_ranks=2, device=device)
    precision = PrecisionPolicy(compute=compute).forecast(site)
    optimizer = AdamW().forecast(site, precision)
    placement = Zero(**zero).forecast(site, model, precision, optimizer)
    stage = DeepSpeedCheckpoint(**fields)
    return stage.forecast(site, model, optimizer, placement)  # type: ignore[arg-type]


NVME = pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
CASES = [
    pytest.param({"stage": 1}, "bf16", "", 14 * N, id="1 bf16"),
    pytest.param({"stage": 2}, "fp32", "", 16 * N, id="2 fp32"),
    pytest.param({"stage": 2}, "bf16", "layers.0", 14 * N - 12 * BLOCK, id="2 frozen"),
    pytest.param({"stage": 3}, "bf16", "layers.0", 12 * N - 10 * BLOCK, id="3 frozen"),
    pytest.param({"stage": 3, "nvme": True}, "bf16", "", 12 * N, id="3 nvme", marks=NVME),
]


@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize(("zero", "compute", "frozen", "size"), CASES)
def test_files_are_as_large_as_was_said(
    zero: dict[str, Any], compute: str, frozen: str, size: int, tmp_path: Path
) -> None:
    if zero.pop("nvme", False):
        swap = OptimizerOffload(device="nvme", path=str(tmp_path / "swap"))
        zero |= {"offload_optimizer": swap, "sub_group_size": 300_000}
    (told,) = forecast(zero, shape(frozen=frozen), compute=compute).files(Length(steps=1))
    assert (told.what, told.bytes) == ("1 checkpoint", size)
    case = Case(zero=zero, compute=compute, frozen=frozen, model=MODEL, last=1, save=True)
    run_ranks(run_case, 2, str(tmp_path), case)
    written = tmp_path / "checkpoints/step-00000001" / TAG
    found = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
    assert found == pytest.approx(told.bytes, rel=0.02)


def test_what_is_borrowed_is_in_no_file() -> None:
    frozen = shape(frozen="layers.0", borrowed=True)
    for stage, each in ((2, 14), (3, 12)):
        (told,) = forecast({"stage": stage}, frozen).files(Length(steps=1))
        assert told.bytes == each * (N - BLOCK)


def test_one_more_is_there_while_it_is_written() -> None:
    (told,) = forecast({"stage": 3}, shape(), every=5, keep=3).files(Length(steps=50))
    assert (told.what, told.bytes) == ("4 checkpoints", 4 * 12 * N)


def test_all_are_counted_where_all_are_kept() -> None:
    (told,) = forecast({"stage": 3}, shape(), every=5, keep=None).files(Length(steps=48))
    assert (told.what, told.bytes) == ("10 checkpoints", 10 * 12 * N)


def memory(zero: dict[str, Any], **fields: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Phase -> bytes of a node's host, and of a rank's device."""
    found = forecast(zero, shape(), ranks=4, **fields)
    return {one.phase: one.bytes for one in found.host}, {
        one.phase: one.bytes for one in found.device
    }


def test_memory_of_saving_and_resuming() -> None:
    """Two ranks of four are on a node; parts are padded to ranks."""
    part = -(-N // 4)
    # every rank reads all weights, in 2 bytes, or its part of the state in 12; rank 0 saves them
    expected = {"checkpoint": 2 * max(4 * part, N), "resume": 2 * max(12 * part, 2 * N)}
    assert memory({"stage": 2}, device="cuda") == (expected, {"resume": 8 * part})
    # on CPUs nothing is copied, and moments that are read are those that stay
    assert memory({"stage": 2}) == ({"resume": 2 * max(12 * part, 2 * N)}, {})
    offloaded = {"stage": 2, "offload_optimizer": OptimizerOffload()}
    host, device = memory(offloaded, device="cuda")
    assert host == {"checkpoint": 2 * N, "resume": 2 * max(12 * part, 2 * N)}
    assert device == {}


def test_groups_of_masters_are_copied_one_after_another() -> None:
    host, _ = memory({"stage": 3, "sub_group_size": 1}, device="cuda")
    assert host["checkpoint"] == 2 * 4 * (1001 * 256 // 4)
