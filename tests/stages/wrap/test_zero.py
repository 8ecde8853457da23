"""Live ZeRO engines on ranks: the numbers of a plain loop, and the engine's description of
itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.contracts.precision import LossScaling
from stages.consolidate.weights import open_weights
from stages.wrap.axes import TensorParallel
from stages.wrap.zero import OptimizerOffload, ParameterOffload
from tests.support.processes import RankFailed, run_ranks
from tests.support.tier import spread
from tests.support.zero import Case, has_libaio, plain, run_case

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

CPU = OptimizerOffload(device="cpu")
CASES = {
    "1 offload": {"stage": 1, "offload_optimizer": CPU},
    "2": {"stage": 2, "overlap_comm": True},
    "2 offload torch": {
        "stage": 2, "offload_optimizer": CPU, "optimizer_implementation": "torch",
    },
    "3 nothing persists": {"stage": 3, "param_persistence_threshold": 0, "sub_group_size": 500},
    "3 offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": ParameterOffload()},
    "3 offload parameters": {"stage": 3, "offload_param": ParameterOffload()},
    "3 offload torch": {
        "stage": 3, "offload_optimizer": CPU, "optimizer_implementation": "torch",
    },
}  # fmt: skip


def train(folder: Path, case: Case, ranks: int = 2) -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(run_case, ranks, str(folder), case)[0]
    return result


def each(result: dict[str, Any], key: str) -> list[Any]:
    return [step[key] for step in result["steps"]]


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    case = Case(zero=CASES[name])
    result = train(tmp_path, case)
    losses, norms, weights = plain(tmp_path, case)
    assert each(result, "loss") == pytest.approx(losses, rel=1e-5)
    assert each(result, "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert each(result, "applied") == [True] * 4
    final = load_file(tmp_path / "masters.safetensors")
    assert final.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(final[key], weight, rtol=0, atol=1e-4, msg=key)


PAIR = TensorParallel(size=2)
OFFLOADED = [name for name in CASES if "offload" in name]


@pytest.mark.parametrize("name", spread(OFFLOADED, 2))
def test_divided_layers_whose_state_is_on_the_host(name: str, tmp_path: Path) -> None:
    """Norms are summed by other code there."""
    case = Case(zero={**CASES[name], "tensor_parallel": PAIR})
    result = train(tmp_path, case)
    losses, norms, _ = plain(tmp_path, case)
    assert each(result, "loss") == pytest.approx(losses, rel=1e-5)
    assert each(result, "grad_norm") == pytest.approx(norms, rel=1e-4)
    facts = result["facts"]
    assert (facts["world_size"], facts["tensor_parallel"], facts["axes"]) == (2, 2, {"tensor": 2})


@pytest.mark.parametrize(("stage", "compute"), [(1, "bf16"), (2, "fp16"), (3, "bf16")])
def test_divided_layers_in_half_precision(stage: int, compute: str, tmp_path: Path) -> None:
    scaling = LossScaling(initial_scale=256.0, growth_interval=2) if compute == "fp16" else None
    narrow = {"compute": compute, "loss_scaling": scaling}
    alone = train(tmp_path / "alone", Case(zero={"stage": stage}, **narrow), ranks=1)
    case = Case(zero={"stage": stage, "tensor_parallel": PAIR}, **narrow)
    divided = train(tmp_path / "divided", case)
    assert each(divided, "loss") == pytest.approx(each(alone, "loss"), rel=1e-3)
    assert each(divided, "grad_norm") == pytest.approx(each(alone, "grad_norm"), rel=1e-2)
    assert each(divided, "loss_scale") == each(alone, "loss_scale")


def test_an_overflow_in_one_part_skips_the_step_of_all(tmp_path: Path) -> None:
    scaling = LossScaling(initial_scale=1024.0, growth_interval=1000)
    zero = {"stage": 2, "tensor_parallel": PAIR}
    case = Case(zero=zero, compute="fp16", loss_scaling=scaling, explode_at=1)
    result = train(tmp_path, case, ranks=4)
    assert each(result, "applied") == [True, False, True, True]
    assert each(result, "loss_scale") == [1024.0, 1024.0, 512.0, 512.0]


@pytest.mark.full
def test_unequal_parts_that_more_than_two_ranks_sum(tmp_path: Path) -> None:
    case = Case(zero={"stage": 2, "tensor_parallel": PAIR}, samples=6, last=1)
    with pytest.raises(RankFailed, match="divides into unequal parts"):
        train(tmp_path, case, ranks=6)
    by_parameter = Case(zero={"stage": 3, "tensor_parallel": PAIR}, samples=6)
    result = train(tmp_path / "3", by_parameter, ranks=6)
    losses, norms, _ = plain(tmp_path / "plain", by_parameter)
    assert each(result, "loss") == pytest.approx(losses, rel=1e-5)
    assert each(result, "grad_norm") == pytest.approx(norms, rel=1e-4)


@pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
@pytest.mark.parametrize("parameters", [False, True])
def test_numbers_with_state_on_disk(parameters: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "swap")
    zero = {
        "stage": 3,
        "sub_group_size": 300_000,
        "offload_optimizer": OptimizerOffload(device="nvme", path=path),
    }
    if parameters:
        zero["offload_param"] = ParameterOffload(
            device="nvme", path=path, buffer_size=400_000, buffer_count=40
        )
    model = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    case = Case(zero=zero, model=model, last=3)
    result = train(tmp_path, case)
    losses, norms, weights = plain(tmp_path, case)
    assert each(result, "loss") == pytest.approx(losses, rel=1e-5)
    assert each(result, "grad_norm") == pytest.approx(norms, rel=1e-4)
    facts = result["facts"]
    assert facts["offload_optimizer"] == "nvme"
    assert facts["offload_param"] == ("nvme" if parameters else None)
    final = load_file(tmp_path / "masters.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(final[name], weight, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_without_clipping_reports_the_norm(stage: int, tmp_path: Path) -> None:
    case = Case(zero={"stage": stage}, clip=None, last=2)
    result = train(tmp_path, case, ranks=1)
    losses, norms, _ = plain(tmp_path, case)
    assert each(result, "loss") == pytest.approx(losses, rel=1e-5)
    assert each(result, "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert result["facts"]["max_grad_norm"] is None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_facts_come_from_the_live_objects(stage: int, tmp_path: Path) -> None:
    facts = train(tmp_path, Case(zero={"stage": stage}, compute="bf16", last=1))["facts"]
    classes = {
        1: "BF16_Optimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3",
    }  # fmt: skip
    assert facts["zero_optimizer"] == classes[stage]
    assert facts["zero_stage"] == stage
    assert facts["optimizer"] == "AdamW"
    assert (facts["master"], facts["compute"], facts["reduce"]) == (["fp32"], ["bf16"], "fp32")
    assert facts["buffers"] == ["fp32"]
    written = json.loads((tmp_path / "deepspeed.json").read_text())
    assert written["zero_optimization"]["stage"] == stage
    assert json.loads((tmp_path / "engine.json").read_text())["zero_stage"] == stage


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_keep_what_the_compute_dtype_rounds_off(stage: int, tmp_path: Path) -> None:
    case = Case(zero={"stage": stage}, compute="bf16", last=0, save=True)
    train(tmp_path, case)
    masters = open_weights(str(tmp_path / "saved"))
    for name, weight in plain(tmp_path, case)[2].items():
        assert torch.equal(masters.read(name), weight), name


@pytest.mark.parametrize(
    "zero", [{"stage": 3, "offload_optimizer": CPU}, {"stage": 2}, {"stage": 3}]
)
def test_bf16_masters_when_asked_for(zero: dict[str, Any], tmp_path: Path) -> None:
    facts = train(tmp_path, Case(zero=zero, compute="bf16", master="bf16", last=2))["facts"]
    assert (facts["master"], facts["compute"]) == (["bf16"], ["bf16"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_stay_and_the_rest_trains(stage: int, tmp_path: Path) -> None:
    case = Case(zero={"stage": stage}, frozen="mlp", last=2)
    result = train(tmp_path, case)
    losses, norms, weights = plain(tmp_path, case)
    assert each(result, "loss") == pytest.approx(losses, rel=1e-5)
    assert each(result, "grad_norm") == pytest.approx(norms, rel=1e-4)
    trained = load_file(tmp_path / "masters.safetensors")
    assert trained.keys() == {name for name in weights if "mlp" not in name}


@pytest.mark.parametrize(("stage", "initial"), [(2, 1024.0), (2, 1.0), (3, 1024.0)])
def test_overflow_skips_the_step_and_halves_the_scale(
    stage: int, initial: float, tmp_path: Path
) -> None:
    scaling = LossScaling(initial_scale=initial, growth_interval=1000)
    case = Case(zero={"stage": stage}, compute="fp16", loss_scaling=scaling, explode_at=1)
    result = train(tmp_path, case)
    assert each(result, "applied") == [True, False, True, True]
    assert each(result, "loss_scale") == [initial, initial, initial / 2, initial / 2]
    assert math.isinf(each(result, "grad_norm")[1])


@pytest.mark.parametrize("stage", [2, 3])
def test_growing_the_scale_does_not_change_the_update(stage: int, tmp_path: Path) -> None:
    def run(interval: int) -> dict[str, Any]:
        scaling = LossScaling(initial_scale=256.0, growth_interval=interval)
        case = Case(zero={"stage": stage}, compute="fp16", loss_scaling=scaling)
        return train(tmp_path / str(interval), case)

    growing, constant = run(1), run(1000)
    assert each(growing, "loss_scale") == [256.0, 512.0, 1024.0, 2048.0]
    assert each(constant, "loss_scale") == [256.0] * 4
    assert each(growing, "grad_norm") == pytest.approx(each(constant, "grad_norm"), rel=5e-3)
    ours = load_file(tmp_path / "1/masters.safetensors")
    for name, weight in load_file(tmp_path / "1000/masters.safetensors").items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=2e-4, msg=name)
