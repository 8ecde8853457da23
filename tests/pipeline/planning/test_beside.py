"""The plan of a run that is starting is for the processes that it has, not those of its recipe."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.chain.plan import Plan, plan_file
from pipeline.commands.run import plan_shown_if_out_of_memory
from pipeline.distributed.settings import ProcessCounts
from pipeline.errors import RunFailed
from pipeline.execution import rundir
from pipeline.execution.run_spec import RunSpec
from pipeline.hardware.gpus import GIB
from pipeline.planning import beside
from tests.support.nvml import library

RECIPE = Path(__file__).parents[3] / "recipes" / "llama8b_fsdp.yaml"
STARTED = ProcessCounts(procs=8, per_node=4, nodes=2)
WHERE = "llama8b_fsdp on 2 nodes, 8 x GPU"


def make(started: ProcessCounts) -> Plan:
    overrides = ["launch.device=cuda", "launch.procs=null"]
    return plan_file(RECIPE, overrides, forecast=True, started=started)


def test_processes_of_several_nodes() -> None:
    found = beside.estimated(make(STARTED))
    assert (found.topology.ranks, found.topology.local_ranks) == (8, 4)
    assert beside.record(found)["lines"][1] == WHERE


def test_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make(STARTED)
    messages: list[dict[str, Any]] = []

    def started(module: str, message: dict[str, Any], *shown: str, **options: object) -> None:
        messages.append(message)
        raise OSError

    monkeypatch.setattr(beside, "start_child", started)
    with beside.planned_beside(plan, tmp_path):
        pass
    (given,) = messages
    spec = given.pop("spec")
    assert given == {"procs": 8, "per_node": 4}
    assert spec == RunSpec.of(plan, tmp_path).dump()
    monkeypatch.setattr("os.nice", lambda more: None)
    assert beside.main(RunSpec.load(spec), 8, 4) == 0  # without any other file of the run
    assert json.loads((tmp_path / rundir.PLAN).read_text())["lines"][1] == WHERE


def test_out_of_memory_the_plan_is_that_of_the_run() -> None:
    def fail(plan: Plan) -> None:
        raise RunFailed("rank 0 failed", memory="device")

    with pytest.raises(RunFailed) as caught, plan_shown_if_out_of_memory(make) as kept:
        fail(kept(STARTED))
    assert f"  {WHERE}" in str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("name", "kind", "memory"),
    [("NVIDIA H100 80GB HBM3", "H100", 79.2), ("NVIDIA X1", None, 48.0)],
)
def test_gpus_of_this_machine(
    name: str, kind: str | None, memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = SimpleNamespace(used=0, total=48 * GIB)
    nvml = library(
        nvmlDeviceGetName=lambda handle: name, nvmlDeviceGetMemoryInfo=lambda handle: size
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = beside.estimated(make(STARTED))
    assert found.hardware.kind == kind
    assert found.hardware.device_memory == round(memory * GIB)
    assert found.fits is not None
