"""Accelerators by the names that people and drivers use."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.hardware.gpus import GIB, accelerators, find_accelerator, gpu_count

NAMES = {
    "A100 40GB": ["NVIDIA A100-SXM4-40GB", "A100 40GB", "a100 40 GB", "A100 40GiB", "A100 40 GiB",
       "A100 40G"],
    "A100": ["NVIDIA A100-SXM4-80GB", "A100", "A100 80G", "A100 80GiB"],
    "V100": ["V100 32G", "Tesla V100-SXM2-32GB", "V100 32GB"],
    "V100 16GB": ["V100 16 g", "Tesla V100-SXM2-16GB"],
    "A10G": ["A10G 24G", "A10G PCIe", "NVIDIA A10G"], "L40S": ["L40S PCIe", "NVIDIA L40S"],
    "L4": ["NVIDIA L4 PCIe 24GB", "NVIDIA L4", "l4 24gb"],
    "RTX 4090": ["RTX 4090 PCIe", "NVIDIA GeForce RTX 4090", "RTX4090", "4090"],
    "H100": ["NVIDIA H100 80GB HBM3", "H100 SXM", "H100SXM", "H100-SXM5"],
    "H100 NVL": ["NVIDIA H100 NVL", "H100NVL"], "H200": ["NVIDIA H200", "H200 141GB", "h200"],
    "RTX A6000": ["NVIDIA RTX A6000", "RTXA6000", "A6000"],
    "MI300X": ["AMD Instinct MI300X", "MI300X 192GB"], "T4": ["Tesla T4", "T4 16GB"],
    "A100 40GB PCIe": ["NVIDIA A100-PCIE-40GB"], "A100 PCIe": ["NVIDIA A100 80GB PCIe"],
    "A800": ["NVIDIA A800-SXM4-80GB"], "A800 PCIe": ["NVIDIA A800 80GB PCIe"],
    "H800 PCIe": ["NVIDIA H800 PCIe"], "H800": ["NVIDIA H800"], "H100 PCIe": ["NVIDIA H100 PCIe"],
    "B200": ["NVIDIA B200"], "RTX 3090": ["NVIDIA GeForce RTX 3090"],
    "V100 PCIe": ["Tesla V100-PCIE-32GB"], "RTX 6000 Ada": ["NVIDIA RTX 6000 Ada Generation"],
    "V100 16GB PCIe": ["Tesla V100-PCIE-16GB"], "L40": ["NVIDIA L40"], "A10": ["NVIDIA A10"],
    "RTX 3060": ["3060 12GB"], "RTX 3090 Ti": ["RTX 3090 Ti"],
    "RTX 4060 Ti": ["NVIDIA GeForce RTX 4060 Ti"], "RTX 4060 Ti 16GB": ["RTX 4060 Ti 16GB"],
    "RTX 3080": ["3080"], "RTX 3080 12GB": ["3080 12GB"], "RTX 5090": ["NVIDIA GeForce RTX 5090"],
    "RTX PRO 6000 Blackwell": ["NVIDIA RTX PRO 6000 Blackwell Workstation Edition"],
    "A30": ["NVIDIA A30"], "A40": ["NVIDIA A40"], "P100 PCIe": ["Tesla P100-PCIE-16GB"],
    "H20": ["NVIDIA H20"], "B300": ["NVIDIA B300 SXM6 AC"], "GB200": ["NVIDIA GB200"],
    "GH200 480GB": ["NVIDIA GH200 480GB"], "GH200": ["GH200 96GB"],
    "MI325X": ["AMD Instinct MI325X"], "MI355X": ["MI355X"], "MI210": ["MI210"],
}  # fmt: skip
"""Device -> names that people and drivers have for it."""


@pytest.mark.parametrize("device", NAMES)
def test_devices_are_found_by_their_own_names(device: str) -> None:
    found = [find_accelerator(name) for name in NAMES[device]]
    assert [one and one.name for one in found] == [device] * len(found)


@pytest.mark.parametrize(
    "name",
    [
        "V100 12GB", "RTX 6000", "Quadro RTX 6000", "NVIDIA A100-SXM-64GB",
        "H100 96GB", "H100 64GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 D", "RTX 3060 8GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG 1g.10gb",
        "NVIDIA H200 NVL", "NVIDIA A16", "H20 141GB", "H100 PCIe 40GB",
        "A100 40GB 80GB", "A100 64G", "H200 PCIe", "B200 PCIe", "MI300X PCIe", "L40S SXM4",
        "H100 PCIe SXM5", "", "GPU", "80GB",
    ],
)  # fmt: skip
def test_no_device_stands_for_another(name: str) -> None:
    assert find_accelerator(name) is None


def test_each_known_device_is_found_by_its_name() -> None:
    for device in accelerators():
        assert find_accelerator(device.name) is device


def test_cards_are_not_taken_for_modules() -> None:
    for name in ("A100", "A800", "H100", "H800", "V100"):
        module, card = find_accelerator(f"{name} SXM"), find_accelerator(f"{name} PCIe")
        assert module is not None
        assert card is not None
        assert (module.on_pcie, card.on_pcie) == (False, True)
        assert card.peers < module.peers
        assert card.bandwidth <= module.bandwidth


def test_bf16_is_as_slow_as_fp32_where_it_is_emulated() -> None:
    for device in accelerators():
        old = device.name.split()[0] in ("V100", "P100", "T4") or device.name == "RTX 2080 Ti"
        assert device.bf16 == (not old)
        assert device.rate("bf16") == (device.flops_fp32 if old else device.flops)
        assert (device.rate("fp16"), device.rate("fp32")) == (device.flops, device.flops_fp32)


@pytest.mark.parametrize(
    ("name", "rates"),
    [("RTX 3060", (25.5e12, 360e9, 32e9, 0.8)), ("A100", (3.12e14, 2039e9, 3e11, 0.87))],
)
def test_rates_are_those_of_data_sheets(name: str, rates: tuple[float, ...]) -> None:
    found = find_accelerator(name)
    assert found is not None
    assert (found.flops, found.bandwidth, found.peers, found.matmul) == rates


@pytest.mark.parametrize(("name", "memory"), [("H100", 79.2), ("A100 40GB", 39.4), ("L4", 22.0)])
def test_memory_is_what_drivers_tell(name: str, memory: float) -> None:
    found = find_accelerator(name)
    assert found is not None
    assert found.memory == round(memory * GIB)


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    assert gpu_count(tmp_path, {}) == 0
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert gpu_count(tmp_path, {}) == 3
    driver = tmp_path / "proc/driver/nvidia/gpus"
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (driver / name).mkdir(parents=True)
    assert gpu_count(tmp_path, {}) == 2
    chosen = {"": 0, "-1": 0, "0": 1, "0,1": 2, "0,1,2": 2, "0,-1,1": 1, "GPU-abc": 1}
    for visible, count in chosen.items():
        assert gpu_count(tmp_path, {"CUDA_VISIBLE_DEVICES": visible}) == count
