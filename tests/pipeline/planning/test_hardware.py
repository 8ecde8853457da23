"""Descriptions of machines, and what a GPU needs beyond tensors."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.commands.options import link
from pipeline.distributed.process_group import DistContext
from pipeline.doctor.report import MachineReport
from pipeline.errors import UsageError
from pipeline.execution.gpu_records import read_record, record_memory
from pipeline.planning import hardware
from pipeline.planning.forecast import Held
from pipeline.planning.hardware import Hardware, HardwareOptions, Margins, Rate, margins_for
from pipeline.planning.memory_plan import shortages
from pipeline.planning.shapes import Topology
from tests.support.command import pipe
from tests.support.runs import context

GIB = 1 << 30
RECIPE = Path(__file__).parents[3] / "recipes" / "llama8b_fsdp.yaml"
NODE = Topology(ranks=8, local_ranks=8, device="cuda")
MACHINE: dict[str, Any] = {
    "schema_version": 1, "procs": 8, "host_memory_bytes": 999 * GIB, "device": "cuda",
    "matmul_flops": {"fp32": 5e13, "bf16": 7e14},
    "allreduce": [{"bytes": 1 << 28, "seconds": 1.0, "algbw": 2e11, "busbw": 3.5e11}],
    "allgather": [], "host_copy_bytes_per_s": 1e10, "h2d_bytes_per_s": 5e10,
    "d2h_bytes_per_s": None, "disk_write_bytes_per_s": 1e9, "disk_read_bytes_per_s": 2e9,
}  # fmt: skip


def machine(name: str = "NVIDIA H100 80GB HBM3", **changed: Any) -> MachineReport:
    devices = [{"name": name, "memory_bytes": 78 * GIB, "compute_capability": "9.0"}]
    return MachineReport.model_validate_json(json.dumps(MACHINE | {"devices": devices} | changed))


def test_machines_that_are_asked_about() -> None:
    given = {"gpus": 4, "nodes": 2, "memory": 60, "host_memory": 500, "interconnect": 50}
    machines = HardwareOptions(gpu="H100", **given)
    assert (machines.on_gpus, machines.procs) == (True, 8)
    site = hardware.resolve_topology(machines, 8, "cuda")
    assert (site.ranks, site.local_ranks, site.nodes) == (8, 4, 2)
    found = hardware.resolve_hardware(machines, site, compute="bf16")
    assert (found.device_memory, found.host_memory) == (60 * GIB, 500 * GIB)
    assert found.peak == 989.5e12
    assert found.rates["compute"] == Rate(989.5e12, "data sheet")
    assert found.rates["network between nodes"] == Rate(50e9, "rate as given")
    assert hardware.resolve_hardware(machines, site, compute="fp32").rates["compute"].value == 67e12
    four = HardwareOptions(nodes=4)
    assert (four.procs, hardware.resolve_topology(four, 32, "cuda").local_ranks) == (32, 8)


def test_a_measured_machine_goes_before_data_sheets() -> None:
    machines = HardwareOptions(gpu="H100", machine=machine(), host_memory=50, disk=3)
    found = hardware.resolve_hardware(machines, NODE, compute="bf16")
    assert (found.device_memory, found.host_memory) == (78 * GIB, 50 * GIB)
    measured = {part: rate.value for part, rate in found.rates.items() if rate.measured}
    assert measured == {"compute": 7e14, "network inside nodes": 3.5e11, "PCIe to the GPU": 5e10}
    # The machine's report has no rate of the GPU's own memory; the disk's is the option's.
    assert (found.rates["memory"].value, found.rates["NVMe"].value) == (3350e9, 3e9)
    assert found.peak == 989.5e12


def test_a_gpu_without_bf16_computes_it_as_slowly_as_fp32() -> None:
    def rate(compute: str, **machines: Any) -> Rate:
        found = hardware.resolve_hardware(HardwareOptions(**machines), NODE, compute=compute)
        return found.rates["compute"]

    sheet = rate("bf16", gpu="V100 32G")
    assert (sheet.value, "has no bf16" in sheet.origin) == (15.7e12, True)
    assert rate("fp16", gpu="V100").value > 1e14
    assert rate("bf16", machine=machine("Tesla V100-SXM2-32GB")).measured


@pytest.mark.parametrize(
    ("gpu", "hint"),
    [
        ("h10", r"did you mean `H100`\? or say --memory"),
        ("V100 12GB", r"did you mean `V100 16GB`\? or say --memory"),
        (
            "Q5",
            r"known: A10, A10G, A30, A40, A100, A800, B200, .*, RTX cards as in `RTX 4090`; or ",
        ),
    ],
)
def test_an_unknown_gpu_is_refused_at_once(gpu: str, hint: str) -> None:
    said = f"--gpu {gpu}: no GPU of this name is known .{hint}"
    with pytest.raises(UsageError, match=said) as no:
        HardwareOptions(gpu=gpu)
    assert len(str(no.value)) < 350


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        ({"gpu": "A100", "machine": machine()}, "one with NVIDIA H100 80GB HBM3, not with A100"),
        ({"machine": machine(device="cpu", devices=[])}, "one with CPUs, not with GPUs"),
    ],
)
def test_what_contradicts_itself_is_refused(machines: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hardware.resolve_hardware(HardwareOptions(**machines), NODE, compute="bf16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["launch.device=cpu", "--gpus", "4"], "--gpus is about GPUs"),
        (["launch.device=cpu", "--nodes", "2"], "--nodes is about GPUs"),
        (["--interconnect", "fast"], "'fast' is neither a number of GB/s nor one of 10gbe, "),
        (["--nvme", "nan"], "Invalid value for '--nvme': 'nan' is not a number"),
        (["--price", "0"], "Invalid value for '--price': 0"),
    ],
)
def test_what_no_machine_has_is_refused(options: list[str], message: str) -> None:
    result = pipe("plan", RECIPE, *options)
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_links_are_names_numbers_of_them_or_gb_a_second() -> None:
    assert [link(said) for said in ("400G", "12.5", "4x100gbe", "8x400g")] == [50, 12.5, 50, 400]


def test_a_plan_begins_with_its_verdict_and_ends_with_what_is_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.planning.search.remedies", lambda *_: [])
    steps = ("train.epochs=null", "train.steps=200", "train.global_batch_size=16")
    two = ("--nodes", "2", "--gpu", "H100", "--price", "2", "--interconnect", "8x400g")
    plan = ("plan", RECIPE, "train.micro_batch_size=1", *steps, *two)
    record = json.loads(pipe(*plan, "--json").stdout)
    assert record["hardware"]["rates"]["network between nodes"]["value"] == 400e9
    seconds, speed, tokens = record["seconds"], record["speed"], record["step"]["tokens"]
    assert seconds["least"] == max(seconds["parts"].values()) < seconds["expected"]
    assert speed["tokens_per_second"] == pytest.approx(tokens / seconds["expected"])
    assert speed["hours"] == pytest.approx(200 * seconds["expected"] / 3600)
    assert speed["cost"] == pytest.approx(speed["hours"] * 16 * 2)
    shown = pipe(*plan, "--host-memory", "500").stdout.splitlines()
    assert shown[0].startswith("fits: ")
    assert shown[0].endswith(" GiB of 500.0 a host")
    assert any(f"{speed['tokens_per_second']:,.0f} tokens/s" in line for line in shown)
    (network,) = (line for line in shown if line.startswith("network b"))
    assert network.endswith("  rate as given")
    short = pipe(*plan, "--host-memory", "1")
    assert short.exit_code == 3
    assert short.stdout.startswith("does not fit (a host in forward and loss): ")


RECORD: dict[str, Any] = {
    "device": "NVIDIA H100 80GB HBM3", "device_bytes": 79 * GIB, "allocated_bytes": 60 * GIB,
    "reserved_bytes": 66 * GIB, "beside_bytes": 2 * GIB, "torch": "2.13.0",
}  # fmt: skip


def run_of(runs: Path, name: str, when: int = 0, **changed: Any) -> Path:
    (runs / name).mkdir(parents=True)
    (runs / name / "memory.json").write_text(json.dumps(RECORD | changed))
    os.utime(runs / name / "memory.json", (when, when))
    return runs / name


def test_what_is_assumed_lies_between_what_was_published() -> None:
    assumed = Margins()
    assert assumed.source == "assumed until measured"
    assert assumed.of(0) == round(1.2 * GIB)
    # 42 GiB of tensors of a QLoRA of 65B fit on 48 GB, of which programs can use 47.5 GiB.
    assert assumed.of(42 * GIB) <= 47.5 * GIB
    assert assumed.of(round(9.16 * GIB)) >= 10.22 * GIB


def test_the_newest_run_on_such_gpus_is_taken(tmp_path: Path) -> None:
    assert margins_for("H100", record=None, overhead=None, runs=tmp_path) == Margins()
    run_of(tmp_path, "older", 1)
    run_of(tmp_path, "newer", 2, reserved_bytes=63 * GIB)
    run_of(tmp_path, "another", 3, device="NVIDIA A100-SXM4-80GB")
    run_of(tmp_path, "too small to tell", 4, allocated_bytes=GIB, reserved_bytes=3 * GIB)
    run_of(tmp_path, "no record", 5, reserved_bytes="much")
    found = margins_for("H100 SXM", record=None, overhead=None, runs=tmp_path)
    assert found.source == "measured by run newer"
    assert found.of(40 * GIB) == 44 * GIB
    assert margins_for("H100", record=None, overhead=0.5, runs=tmp_path).of(40 * GIB) == 42.5 * GIB
    assert margins_for(None, record=None, overhead=None, runs=tmp_path) == Margins()


def test_a_run_that_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, "mine", allocated_bytes=GIB, reserved_bytes=2 * GIB)
    for place in (run, run / "memory.json"):
        found = margins_for("H100", record=place, overhead=None, runs=tmp_path)
        assert (found.fragmentation, found.overhead) == (1.0, 2 * GIB)
    with pytest.raises(UsageError, match=r"is of a run on NVIDIA H100.*the plan is for A100"):
        margins_for("A100", record=run, overhead=None, runs=tmp_path)
    with pytest.raises(UsageError, match="No such file"):
        read_record(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="not a record of a run's memory: reserved_bytes"):
        read_record(run_of(tmp_path, "broken", reserved_bytes=0))


def test_a_training_on_gpus_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {
        "mem_get_info": (10 * GIB, 79 * GIB), "get_device_name": "NVIDIA H100 80GB HBM3",
        "max_memory_allocated": 60 * GIB, "max_memory_reserved": 66 * GIB,
        "memory_reserved": 65 * GIB,
    }  # fmt: skip
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    fuller = RECORD | {"reserved_bytes": 67 * GIB}
    ctx = context(DistContext(device=torch.device("cuda"), world_size=3), tmp_path)
    for others, reserved in (([fuller, None], 67 * GIB), ([None], 66 * GIB)):
        monkeypatch.setattr(
            DistContext, "gather", lambda self, mine, others=others: [mine, *others]
        )
        record_memory(ctx)
        assert read_record(tmp_path).reserved_bytes == reserved
    found = json.loads((tmp_path / "memory.json").read_bytes())
    assert found == RECORD | {"beside_bytes": 4 * GIB, "torch": torch.__version__}


def test_what_is_too_little() -> None:
    told: Any = SimpleNamespace(
        device={"backward": Held.of({"x": 70 * GIB}), "load": Held.of({"x": GIB})},
        host={"load": Held.of({"x": 100 * GIB})},
        peak=70 * GIB,
        host_peak=100 * GIB,
    )
    site = Topology(ranks=8, local_ranks=8, device="cuda")
    margins = Margins(overhead=GIB, fragmentation=0.1)
    less = Hardware(device_memory=78 * GIB - 1, host_memory=99 * GIB)
    assert shortages(told, site, less, margins) == {"device": "backward", "host": "load"}
    enough = Hardware(device_memory=78 * GIB, host_memory=100 * GIB)
    assert shortages(told, site, enough, margins) == {}
    assert shortages(told, replace(site, device="cpu"), less, margins) == {"host": "load"}
