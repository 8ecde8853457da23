"""A step under torch's profiler: kernels, gaps between them, and waits of the host."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.turns import Enough, wait
from pipeline import Progress, StepCallback

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the runtime that hold up the host; cudaMemcpyAsync is none of them."""
TOP = 25
KINDS: Mapping[str, Sequence[str]] = {
    "attention": ("flash", "fmha", "sdpa", "attention", "flex"),
    "products": ("gemm", "cutlass", "nvjet", "cublas", "xmma", "gemv", "splitk"),
    "compiled": ("triton",),
    "copies": ("memcpy", "memset", "copy"),
    "communication": ("nccl",),
}
"""Kind -> parts of the names of its kernels; the first that fits counts."""


@dataclass
class Profiled(StepCallback):
    """Profiles the next step, then raises Enough."""

    device: torch.device
    result: dict[str, Any]
    _profile: profile | None = field(default=None, init=False)

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        wait(self.device)
        if self._profile is None:
            kinds = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=kinds)
            self._profile.start()
            return
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text("utf-8"))["traceEvents"]
        self.result["profile"] = summary(events)
        raise Enough


def summary(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a step's trace shows, in milliseconds: time by kind of kernel, the kernels that
    take most, time between kernels, and calls that held up the host."""
    spans = [one for one in events if one.get("ph") == "X"]
    kernels = sorted((one for one in spans if one.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    calls = [one for one in spans if one.get("cat") in ("cuda_runtime", "cuda_driver")]
    found: dict[str, Any] = {"kernels": len(kernels)}
    if kernels:
        found |= _device(kernels)
    waits: dict[str, list[float]] = defaultdict(list)
    for call in calls:
        if call["name"].startswith(WAITS) and "Async" not in call["name"]:
            waits[call["name"]].append(call.get("dur", 0) / 1e3)
    found["waits"] = {name: {"calls": len(each), "ms": sum(each)} for name, each in waits.items()}
    found["launches"] = sum("Launch" in call["name"] for call in calls)
    return found


def _device(kernels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names: dict[str, list[float]] = defaultdict(list)
    kinds: dict[str, float] = defaultdict(float)
    busy, gaps, end = 0.0, [], kernels[0]["ts"]
    for one in kernels:
        took = one.get("dur", 0) / 1e3
        names[one["name"]].append(took)
        kinds[kind_of(one["name"])] += took
        if one["ts"] > end:
            gaps.append((one["ts"] - end) / 1e3)
        over = max(one["ts"] + one.get("dur", 0) - max(end, one["ts"]), 0)
        busy += over / 1e3
        end = max(end, one["ts"] + one.get("dur", 0))
    most = sorted(names.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "ms": (end - kernels[0]["ts"]) / 1e3,
        "busy_ms": busy,
        "gaps_over_20us_ms": sum(gap for gap in gaps if gap > 0.02),
        "longest_gap_ms": max(gaps, default=0.0),
        "kinds_ms": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "top": [{"name": n[:120], "calls": len(t), "ms": sum(t)} for n, t in most],
    }


def kind_of(name: str) -> str:
    """Return the kind of a kernel, by its name."""
    low = name.lower()
    for kind, parts in KINDS.items():
        if any(part in low for part in parts):
            return kind
    return "other"
