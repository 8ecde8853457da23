"""A GPU's needs beyond tensors: assumed, or measured by a run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from pipeline.errors import UsageError
from pipeline.execution.gpu_records import read_record, record_memory
from pipeline.planning.forecast import Held
from pipeline.planning.hardware import Hardware, Margins, margins_for
from pipeline.planning.memory_plan import shortages
from pipeline.planning.shapes import Topology
from tests.support.runs import context

GIB = 1 << 30
RECORD: dict[str, Any] = {
    "device": "NVIDIA H100 80GB HBM3", "device_bytes": 79 * GIB, "allocated_bytes": 60 * GIB,
    "reserved_bytes": 66 * GIB, "beside_bytes": 2 * GIB, "torch": "2.13.0",
}  # fmt: skip


def run_of(runs: Path, name: str, when: int = 0, **changed: Any) -> Path:
    (runs / name).mkdir(parents=True)
    (runs / name / "memory.json").write_text(json.dumps(RECORD | changed))
    os.utime(runs / name / "memory.json", (when, when))
    return runs / name


def test_what_is_assumed_lies_between_what_was_published() -> None:
    assumed = Margins()
    assert assumed.source == "assumed until measured"
    assert assumed.of(0) == round(1.2 * GIB)
    # 42 GiB of tensors of a QLoRA of 65B fit on 48 GB, of which programs can use 47.5 GiB.
    assert assumed.of(42 * GIB) <= 47.5 * GIB
    assert assumed.of(round(9.16 * GIB)) >= 10.22 * GIB


def test_the_newest_run_on_such_gpus_is_taken(tmp_path: Path) -> None:
    assert margins_for("H100", record=None, overhead=None, runs=tmp_path) == Margins()
    run_of(tmp_path, "older", 1)
    run_of(tmp_path, "newer", 2, reserved_bytes=63 * GIB)
    run_of(tmp_path, "another", 3, device="NVIDIA A100-SXM4-80GB")
    run_of(tmp_path, "too small to tell", 4, allocated_bytes=GIB, reserved_bytes=3 * GIB)
    run_of(tmp_path, "no record", 5, reserved_bytes="much")
    found = margins_for("H100 SXM", record=None, overhead=None, runs=tmp_path)
    assert found.source == "measured by run newer"
    assert found.of(40 * GIB) == 44 * GIB
    assert margins_for("H100", record=None, overhead=0.5, runs=tmp_path).of(40 * GIB) == 42.5 * GIB
    assert margins_for(None, record=None, overhead=None, runs=tmp_path) == Margins()


def test_a_run_that_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, "mine", allocated_bytes=GIB, reserved_bytes=2 * GIB)
    for place in (run, run / "memory.json"):
        found = margins_for("H100", record=place, overhead=None, runs=tmp_path)
        assert (found.fragmentation, found.overhead) == (1.0, 2 * GIB)
    with pytest.raises(UsageError, match=r"is of a run on NVIDIA H100.*the plan is for A100"):
        margins_for("A100", record=run, overhead=None, runs=tmp_path)
    with pytest.raises(UsageError, match="No such file"):
        read_record(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="not a record of a run's memory: reserved_bytes"):
        read_record(run_of(tmp_path, "broken", reserved_bytes=0))


def test_a_training_on_gpus_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {
        "mem_get_info": (10 * GIB, 79 * GIB), "get_device_name": "NVIDIA H100 80GB HBM3",
        "max_memory_allocated": 60 * GIB, "max_memory_reserved": 66 * GIB,
        "memory_reserved": 65 * GIB,
    }  # fmt: skip
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    fuller = RECORD | {"reserved_bytes": 67 * GIB}
    ctx = context(DistContext(device=torch.device("cuda"), world_size=3), tmp_path)
    for others, reserved in (([fuller, None], 67 * GIB), ([None], 66 * GIB)):
        monkeypatch.setattr(
            DistContext, "gather", lambda self, mine, others=others: [mine, *others]
        )
        record_memory(ctx)
        assert read_record(tmp_path).reserved_bytes == reserved
    found = json.loads((tmp_path / "memory.json").read_bytes())
    assert found == RECORD | {"beside_bytes": 4 * GIB, "torch": torch.__version__}


def test_what_is_too_little() -> None:
    told: Any = SimpleNamespace(
        device={"backward": Held.of({"x": 70 * GIB}), "load": Held.of({"x": GIB})},
        host={"load": Held.of({"x": 100 * GIB})},
        peak=70 * GIB,
        host_peak=100 * GIB,
    )
    site = Topology(ranks=8, local_ranks=8, device="cuda")
    margins = Margins(overhead=GIB, fragmentation=0.1)
    less = Hardware(device_memory=78 * GIB - 1, host_memory=99 * GIB)
    assert shortages(told, site, less, margins) == {"device": "backward", "host": "load"}
    enough = Hardware(device_memory=78 * GIB, host_memory=100 * GIB)
    assert shortages(told, site, enough, margins) == {}
    assert shortages(told, replace(site, device="cpu"), less, margins) == {"host": "load"}
