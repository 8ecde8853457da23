"""The forecast of ZeRO's memory: against the allocator on real runs, and its arithmetic."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pipeline.forecast.phases import BACKWARD

from stages.wrap.zero import OptimizerOffload, ParameterOffload, Zero
from stages.wrap.zero.memory import Setting, Weight, Weights, gradients, held, peak
from tests.support.forecasts import Told, declared
from tests.support.processes import run_ranks

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
OFFLOADED = {"offload_optimizer": OptimizerOffload(), "offload_param": ParameterOffload()}
BILLION = 1_000_000_000


@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize(
    "fields",
    [
        {"zero": {"stage": 1}},
        {"zero": {"stage": 2, "reduce_bucket_size": 500_000}},
        {"zero": {"stage": 3, "reduce_bucket_size": 500_000}},
        {"zero": {"stage": 3, "reduce_bucket_size": 500_000, **OFFLOADED}, "lora": {"rank": 64}},
    ],
)
def test_a_real_run_holds_what_was_forecast(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import zero_memory
    import zero_memory_rank

    job = zero_memory_rank.Job(model=zero_memory.SMALL, micro_batches=2, **fields)
    ranks = run_ranks(zero_memory_rank.run_job, 2, str(tmp_path), job)
    rows = list(zero_memory.compared(job, 2, ranks))
    assert [row.phase for row in rows][-2:] == ["step", "between"]
    for row in rows:
        assert row.predicted == pytest.approx(row.measured, rel=0.05), row.phase


def model(blocks: int, elements: int, *, tied: bool = False) -> Weights:
    """Blocks of ten parameters each, and embeddings as large as a block."""
    block = tuple(Weight(elements // 10) for _ in range(10))
    head = () if tied else (Weight(elements),)
    return Weights((block,) * blocks, (Weight(elements), Weight(1000), *head), tied)


def at(where: str, setting: Setting, weights: Weights, moment: Any, **how: Any) -> dict[str, int]:
    """Name -> bytes of what is on the device, the host, or the disk."""
    items = held(setting, weights, moment, **how)
    return {item.name: item.bytes for item in items if item.where == where}


def test_stage_1_of_bf16_sums_gradients_whole_and_in_fp32() -> None:
    weights = model(8, 40_000_000)
    n = sum(weights.trained)
    setting = Setting(stage=Zero(stage=1), world=8)
    states = at("device", setting, weights, "between")
    assert states == {
        "parameters": 2 * n, "masters": 4 * n // 8, "optimizer state": n, "summed gradients": 4 * n,
    }  # fmt: skip
    step = at("device", setting, weights, "step")
    assert step["flattened gradients"] == 4 * n
    assert gradients(setting, weights) == (2, 0)


def test_the_reduce_bucket_is_allocated_whole() -> None:
    weights = model(2, 1_000_000)
    for stage, bytes_ in ((2, 2), (3, 4)):
        setting = Setting(stage=Zero(stage=stage), world=8)
        assert at("device", setting, weights, "backward")["reduce bucket"] == bytes_ * BILLION // 2
    overlapping = Setting(stage=Zero(stage=2, overlap_comm=True), world=8)
    assert at("device", overlapping, weights, "backward")["reduce bucket"] == 2 * BILLION


def test_stage_3_gathers_until_the_limit_of_live_parameters() -> None:
    weights = model(40, 200_000_000)
    setting = Setting(stage=Zero(stage=3), world=8)
    most = max(
        at("device", setting, weights, "forward", place=place)["parameters in use"]
        for place in range(40)
    )
    assert 2 * BILLION <= most <= 2.5 * BILLION


def test_offloaded_states_are_on_the_host() -> None:
    weights = model(4, 1_000_000)
    n = sum(weights.trained)
    host = at("host", Setting(stage=Zero(stage=3, **OFFLOADED), world=4), weights, "between")
    assert host == {
        "parts of parameters": 2 * n // 4, "parts of frozen parameters": 0, "masters": n,
        "optimizer state": 2 * n, "gradients of the parts": n, "masters' gradients": n,
    }  # fmt: skip
    setting = Setting(stage=Zero(stage=3, **OFFLOADED), world=4)
    assert peak(setting, weights, "between", where="host") == sum(host.values())
    assert peak(setting, weights, "between", where="device") == 2_000_000_000 + 2 * 4_001_000


def test_states_on_disk_leave_buffers_on_the_host() -> None:
    weights = model(4, 1_000_000)
    n = sum(weights.trained)
    swapped = OptimizerOffload(device="nvme", path="/swap", buffer_count=5)
    stage = Zero(stage=3, offload_optimizer=swapped, sub_group_size=500_000)
    setting = Setting(stage=stage, world=1)
    disk = at("disk", setting, weights, "between")
    assert disk == {"masters": 4 * n, "optimizer state": 8 * n, "masters' gradients": 4 * n}
    host = at("host", setting, weights, "between")
    assert host["swap buffers"] == 4 * 5 * 1_001_000  # the norm and the head


def test_frozen_parameters_have_no_states() -> None:
    frozen = Weights(((Weight(1000, trained=False), Weight(10)),), (Weight(500, trained=False),))
    states = at("device", Setting(stage=Zero(stage=2), world=1), frozen, "between")
    assert states == {
        "parameters": 20,
        "frozen parameters": 3000,
        "masters": 40,
        "optimizer state": 80,
    }


def test_a_tied_heads_gradient_waits_for_that_of_the_embeddings() -> None:
    weights = model(4, 1_000_000, tied=True)
    setting = Setting(stage=Zero(stage=2, reduce_bucket_size=5000), world=2)
    for place in (3, 0):
        held_back = at("device", setting, weights, "backward", place=place)
        assert held_back["the head's gradient"] == 2_000_000


def test_backward_is_where_the_first_stage_holds_most() -> None:
    weights = model(8, 1_000_000)
    n = sum(weights.trained)
    setting = Setting(stage=Zero(stage=1), world=2)
    before = peak(setting, weights, "forward")
    assert peak(setting, weights, "backward") - before == 2 * n + 4 * 1_000_000


@pytest.mark.parametrize(
    ("compute", "accumulation", "fields", "measured"),
    [
        ("fp32", 2, {"stage": 2, "reduce_bucket_size": 500_000}, 96_747_296),
        ("fp32", 3, {"stage": 2, "reduce_bucket_size": 2_000_000}, 93_299_360),
        ("bf16", 2, {"stage": 2, "reduce_bucket_size": 500_000}, 73_797_280),
        ("bf16", 2, {"stage": 1}, 93_598_364),
        ("bf16", 2, {"stage": 3, "reduce_bucket_size": 500_000}, 80_747_557),
    ],
)
def test_backward_with_activations(
    compute: str, accumulation: int, fields: dict[str, Any], measured: int
) -> None:
    """As `pipe plan --measure` has found it on two CPU processes: what the loss needs is gone when
    gradients fill a bucket, and have a part to go to."""
    shape = declared({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "vocab_size": 4000,
        "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4,
    })  # fmt: skip
    told = Told(
        Zero(**fields),
        shape,
        ranks=2,
        length=256,
        accumulation=accumulation,
        compute=compute,
        device="cpu",
    )
    assert told.peaks()[BACKWARD].bytes == pytest.approx(measured, rel=0.005)


def test_gradients_have_a_part_of_their_own_after_the_first_reduction() -> None:
    """In fp32, to be added to those of the micro-batches before when all are there."""
    weights = model(8, 1_000_000)
    setting = Setting(stage=Zero(stage=2, reduce_bucket_size=500_000), world=2, compute="fp32")

    def parts(moment: Any, place: Any = "head") -> int:
        items = held(setting, weights, moment, place=place, accumulating=True)
        return sum(item.bytes for item in items if item.name == "gradients of the part")

    part = parts("forward")
    assert part >= 4 * sum(weights.trained) // 2
    assert [parts("begin"), parts("backward"), parts("reduce")] == [part, part, 2 * part]
    assert parts("backward", 7) == 2 * part
    begun = at("device", setting, weights, "begin", accumulating=True)
    assert "reduce bucket" not in begun
    reduced = at("device", setting, weights, "reduce", accumulating=True)
    assert (reduced["reduce bucket"], reduced["gradient beyond a bucket"]) == (2e6, 4e6)


def test_one_rank_gathers_nothing() -> None:
    setting, weights = Setting(stage=Zero(stage=3), world=1), model(2, 1_000_000)
    loaded = at("device", setting, weights, "load")
    assert loaded["a whole parameter"] == 2 * 1_000_000
    assert at("device", setting, weights, "forward", place=1)["parameters in use"] == 0


def test_the_step_ends_with_small_weights_whole_again() -> None:
    """A few states of small adapters, all of them below the persistence threshold."""
    adapters = tuple(Weight(50_000) for _ in range(10))
    weights = Weights((adapters,) * 8, (Weight(90_000, trained=False),))
    setting = Setting(stage=Zero(stage=3, **OFFLOADED), world=64)
    assert peak(setting, weights, "step") == peak(setting, weights, "between")


def test_a_forecast_needs_no_torch() -> None:
    code = "import sys, stages.wrap.zero.memory; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
