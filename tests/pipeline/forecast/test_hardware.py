"""From what is said of machines to numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pipeline.forecast.hardware import Asked, hardware_of, site_of
from pipeline.forecast.site import Site

from pipeline.cli import main
from pipeline.doctor.report import Machine
from pipeline.errors import UsageError

GIB = 1 << 30
RECIPE = Path(__file__).parents[3] / "recipes" / "llama8b_fsdp.yaml"
NODE = Site(ranks=8, local_ranks=8, device="cuda")
MACHINE: dict[str, Any] = {
    "schema_version": 1,
    "devices": [
        {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 78 * GIB, "compute_capability": "9.0"}
    ],
    "procs": 8,
    "host_memory_bytes": 999 * GIB,
    "matmul_flops": {"fp32": 5e13, "bf16": 7e14},
    "allreduce": [
        {"bytes": 1024, "seconds": 1.0, "algbw": 1.0, "busbw": 1.0},
        {"bytes": 1 << 28, "seconds": 1.0, "algbw": 2e11, "busbw": 3.5e11},
    ],
    "allgather": [],
    "host_copy_bytes_per_s": 1e10,
    "h2d_bytes_per_s": 5e10,
    "d2h_bytes_per_s": None,
    "disk_write_bytes_per_s": 1e9,
    "disk_read_bytes_per_s": 2e9,
    "device": "cuda",
}


def machine(**changed: Any) -> Machine:
    return Machine.model_validate_json(json.dumps({**MACHINE, **changed}))


def gpu(name: str) -> list[dict[str, Any]]:
    return [{**MACHINE["devices"][0], "name": name}]


def pipe(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_machines_that_are_asked_about() -> None:
    asked = Asked(gpus=4, nodes=2, gpu="H100", memory=60, host_memory=500, interconnect=50)
    assert asked.overrides == ["launch.device=cuda"]
    assert asked.procs == 8
    site = site_of(asked, 8, "cuda")
    assert (site.ranks, site.local_ranks, site.nodes) == (8, 4, 2)
    hardware = hardware_of(asked, site, compute="bf16")
    assert hardware.device_memory == 60 * GIB
    assert hardware.host_memory == 500 * GIB
    assert hardware.network == 50e9
    assert hardware.flops == 989.5e12
    assert hardware.measured == ()
    assert hardware_of(asked, site, compute="fp32").flops == 67e12


def test_nodes_alone_are_of_eight() -> None:
    asked = Asked(nodes=4)
    assert (asked.procs, asked.overrides) == (32, [])
    assert site_of(asked, 32, "cuda").local_ranks == 8


def test_a_measured_machine_goes_before_data_sheets() -> None:
    asked = Asked(gpu="H100", machine=machine(), host_memory=50, disk=3)
    found = hardware_of(asked, NODE, compute="bf16")
    assert (found.flops, found.peers, found.host_link) == (7e14, 3.5e11, 5e10)
    assert (found.device_memory, found.host_memory) == (78 * GIB, 50 * GIB)
    # It says nothing of the GPU's own memory, and the disk is as asked.
    assert (found.bandwidth, found.disk_rate) == (3350e9, 3e9)
    assert set(found.measured) == {"flops", "peers", "host_link"}


def test_a_gpu_without_bf16_computes_it_as_slowly_as_fp32() -> None:
    told = "V100 has no bf16, computed at fp32's rate at best"
    asked = Asked(gpu="V100 32G")
    found = hardware_of(asked, NODE, compute="bf16")
    assert found.flops == 15.7e12
    assert [caveat.endswith(told) for caveat in found.caveats] == [True]
    assert hardware_of(asked, NODE, compute="fp16").flops == 125e12
    for compute in ("fp16", "fp32"):
        assert hardware_of(asked, NODE, compute=compute).caveats == ()
    shown = pipe("plan", RECIPE, "--gpu", "V100")
    assert f"not counted: how slow bf16 is on V100: {told}" in shown.output
    record = json.loads(pipe("plan", RECIPE, "--gpu", "V100", "--json").output)
    assert record["caveats"][-1].endswith(told)


def test_a_measured_rate_of_bf16_is_taken_as_it_is() -> None:
    asked = Asked(machine=machine(devices=gpu("Tesla V100-SXM2-32GB")))
    found = hardware_of(asked, NODE, compute="bf16")
    assert (found.flops, found.caveats) == (7e14, ())
    old = {"devices": gpu("Tesla V100-SXM2-32GB"), "matmul_flops": {"fp32": 5e13, "bf16": None}}
    found = hardware_of(Asked(machine=machine(**old)), NODE, compute="bf16")
    assert (found.flops, len(found.caveats)) == (15.7e12, 1)


def test_a_measured_machine_names_its_gpus() -> None:
    asked = Asked(machine=machine())
    assert asked.overrides == ["launch.device=cuda"]
    found = hardware_of(asked, NODE, compute="bf16")
    assert (found.kind, found.device_memory) == ("NVIDIA H100 80GB HBM3", 78 * GIB)
    assert found.bandwidth == 3350e9
    other = hardware_of(Asked(machine=machine(devices=gpu("New"))), NODE, compute="bf16")
    assert (other.kind, other.device_memory, other.bandwidth) == ("New", 78 * GIB, None)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked(gpu="H10"), "--gpu H10: nobody knows it here.*did you mean `H100`.*known: B200, "),
        (Asked(gpu="V100 12GB"), "--gpu V100 12GB: nobody knows it here.*or say --memory"),
        (Asked(gpu="A100", machine=machine()),
         "--machine describes one with NVIDIA H100 80GB HBM3, --gpu says A100"),
        (Asked(gpu="A100", machine=machine(devices=gpu("NVIDIA A100-SXM4-40GB"))),
         "one with NVIDIA A100-SXM4-40GB, --gpu says A100"),
        (Asked(gpu="A100", machine=machine(devices=gpu("New"))), "one with New, --gpu says A100"),
        (Asked(machine=machine(device="cpu", devices=[])),
         "computes on cpu, the recipe on cuda"),
        (Asked(machine=machine(h2d_bytes_per_s=1e-300)),
         "--machine says host_link is 1e-300 a second, which none can be"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(asked: Asked, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hardware_of(asked, NODE, compute="bf16")


@pytest.mark.parametrize("option", [("--gpu", "H100"), ("--gpus", "4"), ("--memory", "40")])
def test_gpus_contradict_a_cpu_that_is_said_beside_them(option: tuple[str, str]) -> None:
    result = pipe("plan", RECIPE, "launch.device=cpu", *option)
    assert result.exit_code == 2
    told = f"{option[0]} is about GPUs, launch.device on the command line means CPUs"
    assert told in result.output
    assert "leave out one of them" in result.output
    # The recipe's own device gives way.
    quick = RECIPE.with_name("quickstart.yaml")
    assert pipe("plan", quick, "--json", *option).exit_code == 0


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_cpus_are_not_planned_as_nodes_of_eight_gpus(nodes: str) -> None:
    result = pipe("plan", RECIPE.with_name("quickstart.yaml"), "--nodes", nodes)
    assert result.exit_code == 2
    assert "--nodes counts nodes with GPUs, and the recipe computes on CPUs" in result.output
    assert "--gpus says how many GPUs a node has" in result.output


AMOUNTS = ["--memory", "--host-memory", "--interconnect", "--nvme", "--overhead"]


@pytest.mark.parametrize("option", AMOUNTS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e300", "much"])
def test_amounts_that_no_machine_has_are_refused(option: str, value: str) -> None:
    result = pipe("plan", RECIPE, option, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}': " in result.output


@pytest.mark.parametrize("option", [*AMOUNTS[:4], "--gpus", "--nodes"])
def test_nothing_at_all_is_refused(option: str) -> None:
    result = pipe("plan", RECIPE, option, "0")
    assert result.exit_code == 2
    assert f"Invalid value for '{option}': 0" in result.output


@pytest.mark.parametrize(("option", "most"), [("--gpus", 256), ("--nodes", 100_000)])
def test_more_than_anyone_has_is_refused(option: str, most: int) -> None:
    result = pipe("plan", RECIPE, option, str(most + 1))
    assert result.exit_code == 2
    assert f"Invalid value for '{option}': {most + 1} is not in the range" in result.output


@pytest.mark.parametrize(("said", "rate"), [("400G", 50e9), ("12.5", 12.5e9), ("100gbe", 12.5e9)])
def test_links_have_names_and_rates(said: str, rate: float) -> None:
    result = pipe("plan", RECIPE, "--json", "--nodes", "2", "--interconnect", said)
    assert json.loads(result.output)["hardware"]["network"] == rate


def test_a_link_that_nobody_knows() -> None:
    result = pipe("plan", RECIPE, "--interconnect", "fast")
    assert "'fast' is neither a number of GB/s nor one of 10gbe, " in result.output


def planned(tmp_path: Path, *options: str, **changed: Any) -> str:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**MACHINE, **changed}), "utf-8")
    return pipe("plan", RECIPE, "--machine", str(file), *options).output


def test_rates_say_where_they_come_from(tmp_path: Path) -> None:
    told = planned(tmp_path)
    assert "8 x NVIDIA H100 80GB HBM3" in told
    assert (
        "compute, network at the rates that were measured, the rest at the rates of data sheets"
        in told
    )
    told = planned(tmp_path, "--nodes", "2", "--gpus", "4", "--interconnect", "400g")
    assert (
        "compute at the rates that were measured, network at the rates that were asked for, "
        "the rest at the rates of data sheets" in told
    )
    within = ("--nodes", "2", "wrap.sharding=hybrid_shard", "--interconnect", "400g")
    assert (
        "compute, network inside nodes at the rates that were measured, network between nodes at "
        "the rates that were asked for, the rest at the rates of data sheets"
    ) in planned(tmp_path, *within)
    assert "at the rates that were measured)" in planned(tmp_path, devices=gpu("New"))
    assert "at the rates of data sheets, " in pipe("plan", RECIPE, "--gpu", "H100").output


def test_advice_takes_the_gpus_of_a_machine(tmp_path: Path) -> None:
    file, out = tmp_path / "machine.json", tmp_path / "advised.yaml"
    file.write_text(json.dumps(MACHINE), "utf-8")
    model = ("Qwen/Qwen2.5-0.5B", "--gpus", "1", "--out", out)
    result = pipe("advise", *model, "--machine", file)
    assert result.exit_code == 0, result.output
    assert "GiB of 78.0 a GPU" in result.output
