"""Descriptions of machines, as numbers and as output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.commands.hardware_options import link
from pipeline.doctor.report import MachineReport
from pipeline.errors import UsageError
from pipeline.planning.hardware import HardwareOptions, Rate, resolve_hardware, resolve_topology
from pipeline.planning.shapes import Topology

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


def pipe(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_machines_that_are_asked_about() -> None:
    machines = HardwareOptions(
        gpus=4, nodes=2, gpu="H100", memory=60, host_memory=500, interconnect=50
    )
    assert (machines.on_gpus, machines.procs) == (True, 8)
    site = resolve_topology(machines, 8, "cuda")
    assert (site.ranks, site.local_ranks, site.nodes) == (8, 4, 2)
    found = resolve_hardware(machines, site, compute="bf16")
    assert (found.device_memory, found.host_memory) == (60 * GIB, 500 * GIB)
    assert found.peak == 989.5e12
    assert found.rates["compute"] == Rate(989.5e12, "data sheet")
    assert found.rates["network between nodes"] == Rate(50e9, "rate as given")
    assert resolve_hardware(machines, site, compute="fp32").rates["compute"].value == 67e12
    assert (
        HardwareOptions(nodes=4).procs,
        resolve_topology(HardwareOptions(nodes=4), 32, "cuda").local_ranks,
    ) == (32, 8)


def test_a_measured_machine_goes_before_data_sheets() -> None:
    machines = HardwareOptions(gpu="H100", machine=machine(), host_memory=50, disk=3)
    found = resolve_hardware(machines, NODE, compute="bf16")
    assert (found.device_memory, found.host_memory) == (78 * GIB, 50 * GIB)
    measured = {part: rate.value for part, rate in found.rates.items() if rate.measured}
    assert measured == {"compute": 7e14, "network inside nodes": 3.5e11, "PCIe to the GPU": 5e10}
    # The machine's report has no rate of the GPU's own memory; the disk's is the option's.
    assert (found.rates["memory"].value, found.rates["NVMe"].value) == (3350e9, 3e9)
    assert found.peak == 989.5e12


def test_a_gpu_without_bf16_computes_it_as_slowly_as_fp32() -> None:
    rate = resolve_hardware(HardwareOptions(gpu="V100 32G"), NODE, compute="bf16").rates["compute"]
    assert (rate.value, "has no bf16" in rate.origin) == (15.7e12, True)
    assert (
        resolve_hardware(HardwareOptions(gpu="V100"), NODE, compute="fp16").rates["compute"].value
        > 1e14
    )
    measured = HardwareOptions(machine=machine("Tesla V100-SXM2-32GB"))
    assert resolve_hardware(measured, NODE, compute="bf16").rates["compute"].measured


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
    with pytest.raises(
        UsageError, match=f"--gpu {gpu}: no GPU of this name is known .{hint}"
    ) as no:
        HardwareOptions(gpu=gpu)
    assert len(str(no.value)) < 350


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        (
            HardwareOptions(gpu="A100", machine=machine()),
            "one with NVIDIA H100 80GB HBM3, not with A100",
        ),
        (
            HardwareOptions(machine=machine(device="cpu", devices=[])),
            "one with CPUs, not with GPUs",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(machines: HardwareOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_hardware(machines, NODE, compute="bf16")


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
