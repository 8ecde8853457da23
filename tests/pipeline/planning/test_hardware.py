"""From what is said of machines to numbers, and to what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.doctor.report import Machine
from pipeline.errors import UsageError
from pipeline.planning.hardware import Asked, hardware_of, site_of
from pipeline.planning.planner import Topology
from tests.support.models import save_tokenizer
from tests.support.runs import TINY

GIB = 1 << 30
NODE = Topology(ranks=8, local_ranks=8, device="cuda")
MACHINE: dict[str, Any] = {
    "schema_version": 1,
    "devices": [
        {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 78 * GIB, "compute_capability": "9.0"}
    ],
    "procs": 8,
    "host_memory_bytes": 999 * GIB,
    "matmul_flops": {"fp32": 5e13, "bf16": 7e14},
    "allreduce": [{"bytes": 1 << 28, "seconds": 1.0, "algbw": 2e11, "busbw": 3.5e11}],
    "allgather": [],
    "host_copy_bytes_per_s": 1e10,
    "h2d_bytes_per_s": 5e10,
    "d2h_bytes_per_s": None,
    "disk_write_bytes_per_s": 1e9,
    "disk_read_bytes_per_s": 2e9,
    "device": "cuda",
}


def machine(name: str = "NVIDIA H100 80GB HBM3", **changed: Any) -> Machine:
    devices = [{**MACHINE["devices"][0], "name": name}]
    return Machine.model_validate_json(json.dumps({**MACHINE, "devices": devices, **changed}))


def pipe(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny training of 200 steps on 8 GPUs."""
    folder = tmp_path_factory.mktemp("recipe")
    save_tokenizer(folder / "tokenizer")
    (folder / "text.txt").write_text("the lamb was sure to go\n")
    stages = {
        "model": {"use": "model.hf", "config": TINY, "tokenizer": "./tokenizer"},
        "precision": {"use": "precision.policy"},
        "data": {"use": "data.text", "files": "./text.txt", "sequence_length": 8},
        "optimizer": {"use": "optimizer.adamw"},
        "wrap": {"use": "wrap.fsdp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {"use": "train.causal_lm", "steps": 200, "global_batch_size": 16},
    }
    launch = {"procs": 8, "device": "cuda"}
    (folder / "r.yaml").write_text(json.dumps({"name": "r", "launch": launch, "stages": stages}))
    return folder / "r.yaml"


def test_machines_that_are_asked_about() -> None:
    asked = Asked(gpus=4, nodes=2, gpu="H100", memory=60, host_memory=500, interconnect=50)
    assert (asked.overrides, asked.procs) == (["launch.device=cuda"], 8)
    site = site_of(asked, 8, "cuda")
    assert (site.ranks, site.local_ranks, site.nodes) == (8, 4, 2)
    found = hardware_of(asked, site, compute="bf16")
    assert (found.device_memory, found.host_memory) == (60 * GIB, 500 * GIB)
    assert (found.network, found.flops, found.peak) == (50e9, 989.5e12, 989.5e12)
    assert found.measured == ()
    assert hardware_of(asked, site, compute="fp32").flops == 67e12
    assert (Asked(nodes=4).procs, site_of(Asked(nodes=4), 32, "cuda").local_ranks) == (32, 8)


def test_a_measured_machine_goes_before_data_sheets() -> None:
    asked = Asked(gpu="H100", machine=machine(), host_memory=50, disk=3)
    found = hardware_of(asked, NODE, compute="bf16")
    assert (found.flops, found.peers, found.host_link) == (7e14, 3.5e11, 5e10)
    assert (found.device_memory, found.host_memory) == (78 * GIB, 50 * GIB)
    # It says nothing of the GPU's own memory, and the disk is as asked.
    assert (found.bandwidth, found.disk_rate) == (3350e9, 3e9)
    assert set(found.measured) == {"flops", "peers", "host_link"}
    assert (found.matmul, found.peak) == (1.0, 989.5e12)


def test_a_gpu_without_bf16_computes_it_as_slowly_as_fp32() -> None:
    found = hardware_of(Asked(gpu="V100 32G"), NODE, compute="bf16")
    assert found.flops == 15.7e12
    assert found.caveats[0].endswith("V100 has no bf16, computed at fp32's rate at best")
    for asked, compute in (
        (Asked(gpu="V100"), "fp16"),
        (Asked(machine=machine("Tesla V100-SXM2-32GB")), "bf16"),
    ):
        found = hardware_of(asked, NODE, compute=compute)
        assert (found.flops > 1e14, found.caveats) == (True, ())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked(gpu="h10"), "no GPU of this name is known.*did you mean `H100`. or say --memory"),
        (Asked(gpu="V100 12GB"), "--gpu V100 12GB: no GPU of this name is known"),
        (Asked(gpu="A100", machine=machine()),
         "--machine describes one with NVIDIA H100 80GB HBM3, --gpu says A100"),
        (Asked(machine=machine(device="cpu", devices=[])), "computes on cpu, the recipe on cuda"),
        (Asked(machine=machine(h2d_bytes_per_s=1e-300)),
         "--machine says host_link is 1e-300 a second, which none can be"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(asked: Asked, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hardware_of(asked, NODE, compute="bf16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["launch.device=cpu", "--gpus", "4"], "--gpus is about GPUs"),
        (["launch.device=cpu", "--nodes", "2"], "--nodes counts nodes with GPUs"),
        (["--interconnect", "fast"], "'fast' is neither a number of GB/s nor one of 10gbe, "),
        (["--interconnect", "0x400g"], "'0x400g' is neither a number"),
        (["--nvme", "nan"], "Invalid value for '--nvme': 'nan' is not a number"),
        (["--memory", "inf"], "Invalid value for '--memory': "),
        (["--price", "0"], "Invalid value for '--price': 0"),
    ],
)
def test_what_no_machine_has_is_refused(recipe: Path, options: list[str], message: str) -> None:
    result = pipe("plan", recipe, *options)
    assert (result.exit_code, message in result.output) == (2, True), result.output


LINKS = {"400G": 50e9, "12.5": 12.5e9, "4x100gbe": 50e9, "8x400g": 400e9}


def test_a_plan_begins_with_its_verdict_and_ends_with_what_is_expected(recipe: Path) -> None:
    two = ("--nodes", "2", "--gpu", "H100", "--price", "2")
    for said, rate in LINKS.items():
        record = json.loads(pipe("plan", recipe, *two, "--interconnect", said, "--json").output)
        assert record["hardware"]["network"] == rate
    seconds, speed = record["seconds"], record["speed"]
    assert seconds["least"] == max(seconds["parts"].values()) < seconds["expected"]
    # 16 samples of 8 tokens
    assert speed["tokens_per_second"] == pytest.approx(128 / seconds["expected"])
    assert speed["hours"] == pytest.approx(200 * seconds["expected"] / 3600)
    assert speed["cost"] == pytest.approx(speed["hours"] * 16 * 2)
    shown = pipe("plan", recipe, *two, "--host-memory", "500", "--interconnect", "8x400g").output
    verdict, *_ = shown.splitlines()
    assert verdict.startswith("fits: ")
    assert verdict.endswith(" GiB of each host's memory")
    assert f"{speed['tokens_per_second']:,.0f} tokens/s" in shown
    assert [
        line.split("  ")[-1] for line in shown.splitlines() if line.startswith("network b")
    ] == ["rate asked for"]
    short = pipe("plan", recipe, *two, "--host-memory", "1")
    assert short.exit_code == 3
    assert short.output.startswith("does not fit: ")
