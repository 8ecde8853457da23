"""What a stage imports before it runs; started by `imports` as a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import PluginError
from pipeline.registry import Entry, Registry
from pipeline.testing.configs import checked, make

HEAVY = ("torch", "transformers", "deepspeed", "accelerate")
"""Packages that only `run` may import: they take seconds, and `pipe check` takes none."""


def _observe(value: str, configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Heavy packages by the moment at which they came."""
    at_start = _loaded()
    entry = Entry(name="the.stage", value=value, distribution="the package", version="")
    try:
        stage = Registry([entry]).load(entry.name)
        at_import = _loaded()
        for fields in configs:
            _try(stage, fields)
    except PluginError:
        return {"importing it": sorted(_loaded() - at_start)}
    return {
        "importing it": sorted(at_import - at_start),
        "checking it": sorted(_loaded() - at_import),
    }


def _try(stage: type, fields: Mapping[str, Any]) -> None:
    try:
        checked(make(stage, fields)[0])
    except Exception:
        return  # is told where the check's answers are looked at


def _loaded() -> set[str]:
    return {name for name in HEAVY if name in sys.modules}


if __name__ == "__main__":
    print(json.dumps(_observe(**json.load(sys.stdin))))
