"""The plans of all settings, made while others are measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import PipeError
from pipeline.planning.hardware import HardwareOptions, Margins
from pipeline.planning.memory_plan import check, estimate_plan


def plan_all(recipes: Mapping[str, Path], device: str, out: Path) -> None:
    """Write name -> plan of each recipe, after each, for this machine's GPU, or its processor."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    machines = HardwareOptions(gpus=1, gpu=gpu) if gpu else HardwareOptions()
    found: dict[str, Any] = {}
    for name, recipe in recipes.items():
        try:
            plan = estimate_plan(check(recipe, [], machines), machines, Margins())
        except PipeError as error:
            found[name] = {"error": str(error).splitlines()[0]}
        else:
            found[name] = {
                "peak": plan.estimate.peak,
                "needed": plan.needed,
                "seconds": plan.time.expected,
                "tokens_per_second": plan.speed and plan.speed.tokens_per_second,
                "phases": {phase: held.bytes for phase, held in plan.estimate.device.items()},
            }
        part = out.with_suffix(".part")
        part.write_text(json.dumps(found), "utf-8")
        part.rename(out)
