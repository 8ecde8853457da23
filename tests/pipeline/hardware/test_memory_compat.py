"""Snapshots of a GPU's memory, with functions in the place of torch's, which need a GPU."""

from __future__ import annotations

import gzip
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import RunFailed
from pipeline.execution import failures
from pipeline.hardware import memory_history, write_snapshot
from stages.train.speed import Profiler

SNAPSHOT = {
    "segments": [{"address": 7, "total_size": 2 << 20, "blocks": [{"size": 512, "state": "a"}]}],
    "device_traces": [[]],
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put functions without a GPU in torch's place; return the calls that switch a history."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: SNAPSHOT)
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda: "| a table |")
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **named: found.append(named)
    )
    return found


def read(path: Path) -> Any:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def test_torch_has_the_private_names() -> None:
    assert callable(torch.cuda.memory._snapshot)
    assert "enabled" in inspect.signature(torch.cuda.memory._record_memory_history).parameters
    implementation = torch.cuda.memory._record_memory_history_impl
    assert {"enabled", "stacks", "max_entries"} <= inspect.signature(
        implementation
    ).parameters.keys()


@pytest.mark.usefixtures("calls")
def test_a_snapshot_is_json_with_a_summary_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.memory.json.gz"
    write_snapshot(path)
    assert read(path) == SNAPSHOT
    assert (tmp_path / "rank-00000.memory.txt").read_text("utf-8") == "| a table |"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_history_ends_with_its_body_but_for_an_error(calls: list[dict[str, Any]]) -> None:
    on, off = {"max_entries": 100_000, "stacks": "python"}, {"enabled": None}
    with memory_history():
        assert calls == [on]
    assert calls == [on, off]
    with pytest.raises(torch.OutOfMemoryError), memory_history():
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert calls == [on, off, on]


def failed(folder: Path, error: BaseException) -> RunFailed:
    """Return the error that a person sees of a rank's."""
    try:
        raise error
    except type(error) as raised:
        failures.record(folder, 3, "train", raised)
    return failures.first(folder, [])


@pytest.mark.usefixtures("calls")
def test_an_error_of_a_gpu_without_memory_names_its_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "failures" / "rank-00003.memory.json.gz"
    error = failed(tmp_path, torch.OutOfMemoryError("CUDA out of memory"))
    assert f"\n  what held the memory: {path}\n  continue with: " in str(error)
    assert error.memory == "device"
    assert read(path) == SNAPSHOT


@pytest.mark.parametrize("error", [MemoryError(), ValueError("another"), RuntimeError("CUDA")])
@pytest.mark.usefixtures("calls")
def test_other_errors_have_none(error: Exception, tmp_path: Path) -> None:
    assert "what held the memory" not in str(failed(tmp_path, error))
    assert list(tmp_path.rglob("*.memory.*")) == []


@pytest.mark.parametrize("gpu", [False, True])
def test_a_snapshot_that_cannot_be_made_hides_nothing(
    gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fails)
    first = "rank 3 failed in slot `train`: OutOfMemoryError: CUDA out of memory\n"
    error = failed(tmp_path, torch.OutOfMemoryError("CUDA out of memory"))
    assert str(error).startswith(first)
    assert "what held the memory" not in str(error)


def test_a_profiled_step_on_a_gpu_leaves_its_memory(
    tmp_path: Path, calls: list[dict[str, Any]]
) -> None:
    profiler: Any = Profiler(tmp_path, None, None)  # type: ignore[arg-type]
    trace = tmp_path / "step-00000004-rank-00000.json.gz"
    with profiler._memory(trace, on_gpu=False):
        pass
    assert (calls, list(tmp_path.iterdir())) == ([], [])
    with profiler._memory(trace, on_gpu=True):
        assert len(calls) == 1
    assert calls[1:] == [{"enabled": None}]
    assert read(tmp_path / "step-00000004-rank-00000-memory.json.gz") == SNAPSHOT
