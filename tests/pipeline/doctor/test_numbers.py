"""Which GPUs a process sees, by nvidia-smi's numbers."""

from __future__ import annotations

import pytest

from pipeline.doctor.gpu_topology import seen

UUIDS = {0: "GPU-8932f937", 1: "GPU-8a40c1d2", 2: "GPU-5e77b003", 3: "GPU-f00d1234"}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("2,1", [2, 1]),
        (" 2, 1", [2, 1]),
        ("0,2,-1,1", [0, 2]),
        ("1,4,0", [1]),
        ("1,,0", [1]),
        ("1,1", []),
        ("GPU-5e77b003,GPU-8a", [2, 1]),
        ("GPU-f,GPU-0000,GPU-5", [3]),
        ("GPU-8", []),  # two begin so
        ("MIG-8932f937/1/0", []),
    ],
)
def test_what_cuda_leaves_visible(chosen: str | None, expected: list[int]) -> None:
    assert seen([], UUIDS, chosen) == expected


def test_gpus_that_torch_told_are_known_by_their_uuids() -> None:
    """CUDA may count them in another order than nvidia-smi."""
    devices = [{"uuid": UUIDS[3]}, {"uuid": UUIDS[1]}]
    assert seen(devices, UUIDS, "0,1") == [3, 1]
    assert seen([{"uuid": "GPU-of-an-instance"}], UUIDS, "MIG-5e77b003") == []
    assert seen(devices, {}, "0,1") == []


def test_a_beginning_of_a_uuid_begins_with_gpu() -> None:
    assert seen([], {0: UUIDS[0]}, "GPU-") == [0]
    assert seen([], {0: UUIDS[0]}, "G") == []
