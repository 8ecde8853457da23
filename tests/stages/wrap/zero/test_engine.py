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

from pipeline.contracts.optimizer import LossScaling
from pipeline.distributed.process_group import DistContext
from stages.consolidate.stream import open_weights
from stages.wrap.axes import TensorParallel
from stages.wrap.zero import OptimizerOffload, ParameterOffload
from tests.support.processes import RankFailed, run_ranks
from tests.support.tier import spread
from tests.support.zero import Case, has_libaio, plain, run_case

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

CPU, PAIR = OptimizerOffload(device="cpu"), TensorParallel(size=2)
TORCH = {"offload_optimizer": CPU, "optimizer_implementation": "torch"}
FIELDS: dict[str, dict[str, Any]] = {
    "1 offload": {"stage": 1, "offload_optimizer": CPU},
    "2": {"stage": 2, "overlap_comm": True},
    "2 offload torch": {"stage": 2, **TORCH},
    "3 nothing persists": {"stage": 3, "param_persistence_threshold": 0, "sub_group_size": 500},
    "3 offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": ParameterOffload()},
    "3 offload parameters": {"stage": 3, "offload_param": ParameterOffload()},
    "3 offload torch": {"stage": 3, **TORCH},
}
# Norms are summed by other code where state is on the host.
DIVIDED = [f"{name}, divided" for name in spread([name for name in FIELDS if "off" in name], 2)]
STAGES = (1, 2, 3)


def fp16(initial: float, interval: int) -> dict[str, Any]:
    scaling = LossScaling(initial_scale=initial, growth_interval=interval)
    return {"compute": "fp16", "loss_scaling": scaling}


HALF = {1: {"compute": "bf16"}, 2: fp16(256.0, 2), 3: {"compute": "bf16"}}
ONE_RANK = {
    **{f"{n} unclipped": Case(zero={"stage": n}, clip=None, last=2) for n in STAGES},
    **{f"{n} alone": Case(zero={"stage": n}, **HALF[n]) for n in STAGES},
}
TWO_RANKS = {
    **{
        name: Case(zero={**FIELDS[name.partition(",")[0]], "tensor_parallel": PAIR})
        for name in DIVIDED
    },
    **{f"{n} half": Case(zero={"stage": n, "tensor_parallel": PAIR}, **HALF[n]) for n in STAGES},
    **{name: Case(zero=fields) for name, fields in FIELDS.items()},
    **{f"{n} frozen": Case(zero={"stage": n}, frozen="mlp", last=2) for n in STAGES},
    **{f"{n} saved": Case(zero={"stage": n}, compute="bf16", last=0, save=True) for n in STAGES},
    **{
        f"{name} bf16": Case(zero=FIELDS[name], compute="bf16", master="bf16", last=2)
        for name in ("2", "3 nothing persists", "3 offload")
    },
    **{
        f"{n} overflow from {initial}": Case(zero={"stage": n}, **fp16(initial, 1000), explode_at=1)
        for n, initial in ((2, 1024.0), (2, 1.0), (3, 1024.0))
    },
    **{
        f"{n} growing after {interval}": Case(zero={"stage": n}, **fp16(256.0, interval))
        for n in (2, 3)
        for interval in (1, 1000)
    },
    **{
        f"{n} {kind}": Case(zero={"stage": n}, last=last, vetoed=1)
        for n in STAGES
        for kind, last in (("vetoed", 2), ("shorter", 1))
    },
}
FOUR_RANKS = {
    "overflow in a part": Case(
        zero={"stage": 2, "tensor_parallel": PAIR}, **fp16(1024.0, 1000), explode_at=1
    )
}
RANKS = {1: ONE_RANK, 2: TWO_RANKS, 4: FOUR_RANKS}


def run_cases(dist: DistContext, folder: str, ranks: int) -> dict[str, Any]:
    return {name: run_case(dist, f"{folder}/{name}", one) for name, one in RANKS[ranks].items()}


def reported(result: dict[str, Any]) -> dict[str, Any]:
    """Return the facts, and lists of what the steps reported."""
    keys = ("loss", "grad_norm", "applied", "loss_scale")
    return result["facts"] | {key: [one[key] for one in result["steps"]] for key in keys}


class Results:
    """What was trained, by the name of its case; all with one number of ranks run in one group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[str, Any] = {}

    def of(self, name: str) -> dict[str, Any]:
        if name not in self._found:
            (ranks,) = (ranks for ranks, cases in RANKS.items() if name in cases)
            self._found |= run_ranks(run_cases, ranks, str(self.folder), ranks, limit=500)[0]
        return reported(self._found[name])

    def masters(self, name: str) -> dict[str, torch.Tensor]:
        self.of(name)
        return load_file(self.folder / name / "masters.safetensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("zero"))


def assert_plain(found: dict[str, Any], case: Case, folder: Path, file: Path) -> None:
    """Compare losses, norms and the masters in a file with a plain loop."""
    losses, norms, weights = plain(folder, case)
    assert found["loss"] == pytest.approx(losses, rel=1e-5)
    assert found["grad_norm"] == pytest.approx(norms, rel=1e-4)
    assert found["applied"] == [True] * case.last
    if "tensor_parallel" not in case.zero:  # a rank has parts of the weights
        final = load_file(file)
        assert final.keys() == {one for one in weights if not case.frozen or case.frozen not in one}
        for key, weight in final.items():
            torch.testing.assert_close(weight, weights[key], rtol=0, atol=1e-4, msg=key)


@pytest.mark.parametrize(
    "name",
    [*FIELDS, *DIVIDED, *(f"{n} {kind}" for n in STAGES for kind in ("frozen", "unclipped"))],
)
def test_numbers_are_those_of_a_plain_loop(name: str, results: Results, tmp_path: Path) -> None:
    found, case = results.of(name), {**ONE_RANK, **TWO_RANKS}[name]
    assert_plain(found, case, tmp_path, results.folder / name / "masters.safetensors")
    assert found["max_grad_norm"] == case.clip
    if name in DIVIDED:
        facts = found["world_size"], found["tensor_parallel"], found["axes"]
        assert facts == (2, 2, {"tensor": 2})


@pytest.mark.parametrize("stage", STAGES)
def test_divided_layers_in_half_precision(stage: int, results: Results) -> None:
    alone, divided = results.of(f"{stage} alone"), results.of(f"{stage} half")
    assert divided["loss"] == pytest.approx(alone["loss"], rel=1e-3)
    assert divided["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-2)
    assert divided["loss_scale"] == alone["loss_scale"]


@pytest.mark.full
def test_unequal_parts_that_more_than_two_ranks_sum(tmp_path: Path) -> None:
    case = Case(zero={"stage": 2, "tensor_parallel": PAIR}, samples=6, last=1)
    with pytest.raises(RankFailed, match="divides into unequal parts"):
        run_ranks(run_case, 6, str(tmp_path), case)
    case = Case(zero={"stage": 3, "tensor_parallel": PAIR}, samples=6)
    found = reported(run_ranks(run_case, 6, str(tmp_path / "3"), case)[0])
    assert_plain(found, case, tmp_path / "plain", tmp_path / "none")


@pytest.mark.skipif(not has_libaio(), reason="NVMe offload needs libaio")
@pytest.mark.parametrize("parameters", [False, True])
def test_numbers_with_state_on_disk(parameters: bool, tmp_path: Path) -> None:
    nvme = {"device": "nvme", "path": str(tmp_path / "swap")}
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": 300_000}
    zero["offload_optimizer"] = OptimizerOffload(**nvme)
    if parameters:
        zero["offload_param"] = ParameterOffload(**nvme, buffer_size=400_000, buffer_count=40)
    model = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    case = Case(zero=zero, model=model, last=3)
    found = reported(run_ranks(run_case, 2, str(tmp_path), case)[0])
    assert_plain(found, case, tmp_path, tmp_path / "masters.safetensors")
    assert found["offload_optimizer"] == "nvme"
    assert found["offload_param"] == ("nvme" if parameters else None)


CLASSES = {1: "BF16_Optimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}


@pytest.mark.parametrize("stage", STAGES)
def test_facts_come_from_the_live_objects(stage: int, results: Results, tmp_path: Path) -> None:
    """And masters keep what the compute dtype rounds off."""
    name = f"{stage} saved"
    facts, folder = results.of(name), results.folder / name
    assert (facts["zero_optimizer"], facts["zero_stage"]) == (CLASSES[stage], stage)
    assert facts["optimizer"] == "AdamW"
    assert (facts["master"], facts["compute"], facts["reduce"]) == (["fp32"], ["bf16"], "fp32")
    assert facts["buffers"] == ["fp32"]
    written = json.loads((folder / "deepspeed.json").read_text())
    assert written["zero_optimization"]["stage"] == stage
    assert json.loads((folder / "engine.json").read_text())["zero_stage"] == stage
    masters = open_weights(str(folder / "saved"))
    for key, weight in plain(tmp_path, TWO_RANKS[name])[2].items():
        assert torch.equal(masters.read(key), weight), key


@pytest.mark.parametrize("name", ["2", "3 nothing persists", "3 offload"])
def test_bf16_masters_when_asked_for(name: str, results: Results) -> None:
    facts = results.of(f"{name} bf16")
    assert (facts["master"], facts["compute"]) == (["bf16"], ["bf16"])


@pytest.mark.parametrize(
    ("name", "initial"),
    [
        ("2 overflow from 1024.0", 1024.0), ("2 overflow from 1.0", 1.0),
        ("3 overflow from 1024.0", 1024.0), ("overflow in a part", 1024.0),
    ],
)  # fmt: skip
def test_overflow_skips_the_step_and_halves_the_scale(
    name: str, initial: float, results: Results
) -> None:
    found = results.of(name)
    assert found["applied"] == [True, False, True, True]
    assert found["loss_scale"] == [initial, initial, initial / 2, initial / 2]
    assert math.isinf(found["grad_norm"][1])


@pytest.mark.parametrize("stage", [2, 3])
def test_growing_the_scale_does_not_change_the_update(stage: int, results: Results) -> None:
    names = f"{stage} growing after 1", f"{stage} growing after 1000"
    growing, constant = map(results.of, names)
    assert growing["loss_scale"] == [256.0, 512.0, 1024.0, 2048.0]
    assert constant["loss_scale"] == [256.0] * 4
    assert growing["grad_norm"] == pytest.approx(constant["grad_norm"], rel=5e-3)
    ours, theirs = map(results.masters, names)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_a_vetoed_step_changes_nothing(stage: int, results: Results) -> None:
    vetoed, shorter = results.of(f"{stage} vetoed"), results.of(f"{stage} shorter")
    assert vetoed["applied"] == [True, False]
    assert vetoed["loss"][0] == shorter["loss"][0]
    kept = results.masters(f"{stage} shorter")
    for name, weight in results.masters(f"{stage} vetoed").items():
        assert torch.equal(weight, kept[name]), name
