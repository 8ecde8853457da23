"""benchmarks/gpu on a processor with tiny shapes, and the numbers of its page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu.page import mfu, page, ratio, step_seconds
from gpu.settings import SETTINGS
from gpu.step_profile import kind_of, summary

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu"


def measured(out: Path) -> dict[str, Any]:
    """Run the program; return its JSON."""
    command = [sys.executable, str(PROGRAM), "--tiny", "--no-tests", "--minutes", "60"]
    command += ["--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads((out / "results.json").read_text("utf-8"))
    return found


@pytest.mark.full
def test_every_setting_is_measured_and_planned(tmp_path: Path) -> None:
    found = measured(tmp_path)
    measurements = {one["setting"]: one for one in found["rows"]}
    assert {*measurements} == {setting.name for setting in SETTINGS}
    for setting in SETTINGS:
        one = measurements[setting.name]
        assert "error" not in one, (setting.name, one["output"])
        assert found["plans"][setting.name]["peak"] > 0
        if setting.saves:
            assert len(one["saves"]["stall_seconds"]) == 3
            assert one["slots"]["export"] > 0
            continue
        assert len(one["ours"]) >= 2
        for other in setting.against:
            assert len(one[other]) == len(one["ours"])
        assert ("profile" in one) == setting.profile
        losses = one["losses"]
        assert losses[-1] < losses[0] + 0.5  # it trains: the text is skewed
    text = (tmp_path / "results.md").read_text("utf-8")
    assert "## Failed" not in text
    assert f"| {SETTINGS[0].name} |" in text


@pytest.mark.full
def test_what_was_measured_is_kept_when_the_time_is_over(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--tiny", "--no-tests", "--out", str(tmp_path)]
    ended = subprocess.run([*command, "--minutes", "0.1"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert found["rows"] == []


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--out", str(tmp_path), "--only", "1b compield"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "no setting '1b compield'; there are: 1b compiled, " in ended.stderr


ONE = {
    "tokens": 1000, "ours": [0.5, 0.4, 0.6], "bare": [0.5, 0.5, 0.5], "operations": 100e12,
    "peak_flops": 400e12, "slots": {"wrap": 1.0}, "first_step_seconds": 2.0,
    "peak": {"allocated": 2 << 30, "reserved": 3 << 30, "device": 4 << 30},
}  # fmt: skip


def test_numbers_of_a_setting() -> None:
    assert step_seconds(ONE) == 0.5
    assert mfu(ONE) == pytest.approx(0.5)
    assert ratio(ONE, "bare") == pytest.approx(1.0)
    assert ratio(ONE, "trainer") is None


def test_the_page_has_measured_and_planned_numbers() -> None:
    plans = {"one": {"peak": 1 << 30, "needed": 2 << 30, "seconds": 0.25}}
    text = page({"settings": {"one": ONE, "two": {"error": "why"}}, "plans": plans})
    assert "| one | 2,000 | 50.0% | 0.500 | 1.000 |  | 2.0 | 1.0 |" in text
    assert "| one | 2.00 | 1.00 | 0.500 | 3.00 | 4.00 | 2.00 | 0.500 | 0.250 | 0.50 |" in text
    assert "| two | why |" in text


def event(category: str, name: str, start: float, length: float) -> dict[str, Any]:
    """Return an event of a trace, in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


def test_a_trace_shows_kernels_gaps_and_waits() -> None:
    events = [
        event("kernel", "sm90_xmma_gemm_bf16", 0, 1000),
        event("kernel", "triton_poi_fused", 500, 1000),  # overlaps with the first
        event("gpu_memcpy", "Memcpy DtoH", 1600, 400),
        event("cuda_runtime", "cudaStreamSynchronize", 0, 3000),
        event("cuda_runtime", "cudaMemcpyAsync", 0, 5),
        event("cuda_runtime", "cudaLaunchKernel", 0, 5),
    ]
    found = summary(events)
    assert (found["kernels"], found["launches"]) == (3, 1)
    assert found["ms"] == pytest.approx(2.0)
    assert found["busy_ms"] == pytest.approx(1.9)
    assert found["gaps_over_20us_ms"] == pytest.approx(0.1)
    assert found["waits"] == {"cudaStreamSynchronize": {"calls": 1, "ms": 3.0}}
    assert found["kinds_ms"] == {"products": 1.0, "compiled": 1.0, "copies": 0.4}
    assert kind_of("void pytorch_flash::flash_fwd_kernel") == "attention"
