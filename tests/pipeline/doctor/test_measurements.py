"""The measurements themselves, tiny."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.doctor import measurements
from pipeline.doctor.ranks import measure


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def test_two_processes_exchange() -> None:
    settings = {"device": "cpu", "sizes": [1000, 4096], "budget": 0.01}
    results = measure(
        "pipeline.doctor.measurements:measure_collectives", settings, procs=2, seconds=60
    )
    assert results.failure == ""
    first, second = results.records
    assert [(record["operation"], record["bytes"]) for record in first] == [
        ("allreduce", 1000),
        ("allgather", 1000),
        ("allreduce", 4096),
        ("allgather", 4096),
    ]
    assert second == ()
    for record in first:
        assert record["seconds"] > 0
        result = measurements.bandwidth(**record, procs=2)
        assert result.algbw == pytest.approx(record["bytes"] / record["seconds"])
        factor = {"allreduce": 1.0, "allgather": 0.5}[record["operation"]]
        assert result.busbw == pytest.approx(factor * result.algbw)


def test_the_disk(tmp_path: Path) -> None:
    records: list[dict[str, float]] = []
    measurements.measure_disk(
        {"folder": str(tmp_path), "size": 1 << 20, "budget": 5}, records.append
    )
    assert [set(record) for record in records] == [
        {"disk_write_bytes_per_s"},
        {"disk_read_bytes_per_s"},
    ]
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
    settings = {
        "device": "cpu",
        "store": str(tmp_path / "store"),
        "size": 1 << 16,
        "dtypes": ["fp32", "bf16"],
        "budget": 0.01,
    }
    measurements.measure_copies(settings, records.append)
    measurements.measure_matmul(settings, records.append)
    assert [list(record) for record in records] == [["host_copy_bytes_per_s"], ["fp32"], ["bf16"]]
    assert all(rate > 0 for record in records for rate in record.values())


@pytest.mark.parametrize("name", ["copies", "matmul"])
def test_all_processes_measure_at_once(name: str) -> None:
    """All report the rate of the slowest, which shows that they met."""
    settings = {"device": "cpu", "size": 1 << 16, "dtypes": ["fp32"], "budget": 0.01}
    results = measure(f"pipeline.doctor.measurements:measure_{name}", settings, procs=2, seconds=60)
    assert results.failure == ""
    first, second = results.records
    assert first == second != ()


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


def test_torch_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    records: list[dict[str, object]] = []
    measurements.measure_torch({}, records.append)
    assert records == [
        {"driver": None, "uuids": []}, {"links": [], "numa_nodes": {}},
        {"cuda": None, "nccl": None, "problem": None, "devices": []},
    ]  # fmt: skip


def test_torch_tells_why_it_cannot_use_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    def available() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old\nmore", stacklevel=1)
        return False

    monkeypatch.setattr("torch.cuda.is_available", available)
    monkeypatch.setattr("torch.version.cuda", None)
    records: list[dict[str, object]] = []
    measurements.measure_torch({}, records.append)
    assert records[-1]["problem"] == "The NVIDIA driver on your system is too old"
