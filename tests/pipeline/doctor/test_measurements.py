"""The measurements themselves, tiny."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from pipeline.doctor import measurements
from pipeline.doctor.measurements import bandwidth


def test_bandwidths() -> None:
    """The definitions are nccl-tests', for 4 processes and 1 MB in 1 ms."""
    reduced = bandwidth("allreduce", 10**6, 1e-3, 4)
    assert (reduced.algbw, reduced.busbw) == pytest.approx((1e9, 1.5e9))
    gathered = bandwidth("allgather", 10**6, 1e-3, 4)
    assert (gathered.algbw, gathered.busbw) == pytest.approx((1e9, 0.75e9))


def test_the_disk(tmp_path: Path) -> None:
    records: list[dict[str, float]] = []
    settings = {"folder": str(tmp_path), "size": 1 << 20, "budget": 5}
    measurements.measure_disk(settings, records.append)
    assert [[*record] for record in records] == [
        ["disk_write_bytes_per_s"], ["disk_read_bytes_per_s"]
    ]  # fmt: skip
    assert all(rate > 0 for record in records for rate in record.values())
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_left_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part's fsync takes 3 s of a clock; the limit is 5 s for 1 GiB."""
    now = [0.0]
    written: list[int] = []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("os.fsync", lambda _: now.__setitem__(0, now[0] + 3))
    monkeypatch.setattr(measurements, "write_at", lambda _, offset, data: written.append(len(data)))
    done, seconds = measurements._write(0, memoryview(bytes(measurements.PIECE)), 1 << 30, 5)
    assert (done, seconds) == (2 * measurements.BETWEEN_SYNCS, 6)
    assert sum(written) == done


def test_copies_and_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(measurements, "SMALLEST", 32)
    monkeypatch.setattr(measurements, "LARGEST", 64)
    records: list[dict[str, float]] = []
    settings = {"device": "cpu", "store": str(tmp_path / "store"), "size": 1 << 16,
                "dtypes": ["fp32", "bf16"], "budget": 0.01}  # fmt: skip
    measurements.measure_copies(settings, records.append)
    measurements.measure_matmul(settings, records.append)
    assert [list(record) for record in records] == [["host_copy_bytes_per_s"], ["fp32"], ["bf16"]]
    assert all(rate > 0 for record in records for rate in record.values())


def test_repetitions_follow_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action takes 2 s here and 4 s on the slowest rank; the limit is 40 s, so all repeat it 10
    times."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def action() -> None:
        now[0] += 2

    seconds = measurements.seconds_each(
        action, device="cpu", budget=40, agree=lambda seconds: 2 * seconds
    )
    assert seconds == 4
    assert now[0] == 2 * (1 + 1 + 10)


@pytest.mark.parametrize("warning", ["", "The NVIDIA driver on your system is too old"])
def test_torch_without_gpus(warning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def available() -> bool:
        if warning:
            warnings.warn(f"{warning}\nmore", stacklevel=1)
        return False

    monkeypatch.setattr("torch.cuda.is_available", available)
    monkeypatch.setattr("torch.version.cuda", None)
    records: list[dict[str, object]] = []
    measurements.measure_torch({}, records.append)
    assert records == [
        {"driver": None, "uuids": []}, {"links": [], "numa_nodes": {}},
        {"cuda": None, "nccl": None, "problem": warning or None, "devices": []},
    ]  # fmt: skip
