"""Records of GPUs, from a library in the place of NVIDIA's: when they are made, and how many."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.plan_view import PlanView
from pipeline.execution import gpu_records
from pipeline.execution.gpu_records import READINGS, HardwareRecord, hardware_records
from pipeline.hardware.telemetry import GpuReading, Telemetry
from pipeline.testing import plan_view
from pipeline.view.run import History
from pipeline.view.run_report import gpu_plots, gpu_rows, run_page
from pipeline.view.screen import Display
from tests.pipeline.view.folders import add, made, step
from tests.support.nvml import NvmlError, library


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(gpu_records, "time", found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", library())
    return found


def looked(record: HardwareRecord, clock: Clock, seconds: float, every: float = 1.0) -> None:
    """Look again and again for so many seconds."""
    for _ in range(round(seconds / every)):
        record.look()
        clock.now += every


def test_a_record_every_15_seconds(tmp_path: Path, clock: Clock) -> None:
    folder = made(tmp_path / "run")
    record = HardwareRecord(folder)
    looked(record, clock, 20)
    add(folder, [step(1), step(2), {"time": 1.0}])
    looked(record, clock, 20)
    found = list(hardware_records(folder))
    assert [(one["time"], one["step"]) for one in found] == [(1000, 0), (1015, 0), (1030, 2)]
    assert found[2]["gpus"][1] == {
        "index": 1, "utilisation": 0.91, "memory_bytes": 1, "memory_total_bytes": 4,
        "temperature": 71, "watts": 650.0, "throttled": ["power cap", "heat"],
    }  # fmt: skip
    assert len(found[2]["gpus"]) == 3


def test_long_runs_have_fewer(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_records, "MOST", 8)
    folder = made(tmp_path / "run")
    looked(HardwareRecord(folder), clock, 15 * 9, every=15)
    assert [one["time"] - 1000 for one in hardware_records(folder)] == [0, 30, 60, 90, 120]
    looked(HardwareRecord(folder), clock, 15 * 10, every=15)  # resumed: every 30 seconds at once
    times = [one["time"] - 1000 for one in hardware_records(folder)]
    assert times == [0, 60, 120, 165, 225]
    assert {one["seconds"] for one in hardware_records(folder)} == {60}


def test_without_gpus_there_is_no_file(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise NvmlError("no driver")

    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlInit=fails))
    looked(HardwareRecord(tmp_path), clock, 100)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_record_and_nothing_else(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def full(*arguments: Any, **named: Any) -> None:
        calls.append(arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gpu_records, "append_line", full)
    looked(HardwareRecord(tmp_path), clock, 100)
    assert len(calls) == 1


@pytest.mark.parametrize(("device", "recorded"), [("cpu", False), ("cuda", True)])
def test_the_launcher_records_runs_on_gpus(
    device: str, recorded: bool, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Planned:
        view: PlanView = plan_view({}, device=device)
        steps = ()

    folder = made(tmp_path / "run")
    with Display(quiet=True).shown(Planned(), folder) as screen:  # type: ignore[arg-type]
        screen.refresh()
    assert (folder / READINGS).exists() == recorded


class Read(Telemetry):
    """GPUs whose readings a test gives, one list after the other."""

    def __init__(self, readings: list[list[GpuReading]]) -> None:
        self.readings = iter(readings)

    def read(self) -> list[GpuReading]:
        return next(self.readings)


def gpu(index: int, busy: float | None, degrees: int, *throttled: str) -> GpuReading:
    return GpuReading(
        index=index, utilisation=busy, memory_bytes=3 << 30, memory_total_bytes=8 << 30,
        temperature=degrees, watts=10.0 * degrees, throttled=throttled,
    )  # fmt: skip


def test_the_report_shows_curves_and_a_table(tmp_path: Path, clock: Clock) -> None:
    folder = made(tmp_path / "run", [{"event": "run started", "time": 999.0}])
    assert "GPUs of the launching machine" not in run_page(History(folder))
    readings = [
        [gpu(0, 0.5, 60), gpu(1, 0.9, 64, "heat")],
        [gpu(0, 0.7, 62), gpu(1, None, 66, "heat", "power cap")],
        [gpu(0, 1.0, 64), gpu(1, 0.8, 60)],
    ]
    record = HardwareRecord(folder, Read(readings))
    looked(record, clock, 30, every=15)
    add(folder, [step(1)])
    looked(record, clock, 15, every=15)
    found = list(hardware_records(folder))
    busy, heat, power = (plot.curves[0] for plot in gpu_plots(found))
    assert (busy.steps, busy.mean) == ([0, 1], [0.7, 0.9])
    assert (busy.least, busy.greatest) == ([0.5, 0.8], [0.9, 1.0])
    assert (heat.mean, heat.greatest, power.mean) == ([63, 62], [66, 64], [630, 620])
    assert list(gpu_rows(found)) == [
        {"gpu": "0", "busy": "70.0 %", "temperature": "64 °C", "power": "620 W, 640 W",
         "memory": "3.0 GiB", "slowed": "never"},
        {"gpu": "1", "busy": "85.0 %", "temperature": "66 °C", "power": "640 W, 660 W",
         "memory": "3.0 GiB", "slowed": "heat 66.7 %, power cap 33.3 %"},
    ]  # fmt: skip
    page = run_page(History(folder))
    assert "<td>heat 66.7 %, power cap 33.3 %</td>" in page
    assert "GPUs busy" in page


def test_many_steps_become_as_many_points_as_a_screen_shows() -> None:
    records = [
        {"step": n, "gpus": [{"index": 0, "utilisation": 0.1 * (n % 2)}]} for n in range(1001)
    ]
    (plot,) = gpu_plots(records)
    curve = plot.curves[0]
    assert len(curve.steps) == 500
    assert curve.steps[:2] == [1, 3]
    assert curve.greatest[1] == 0.1


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    lines = [json.dumps({"gpus": 1}), "{", json.dumps({"step": 1, "gpus": []})]
    (tmp_path / READINGS).write_text("\n".join(lines), "utf-8")
    assert [one["step"] for one in hardware_records(tmp_path)] == [1]
