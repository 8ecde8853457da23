"""`environment.json`: the machine and the packages that a run was last started on."""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.contracts.stage import ENVIRONMENT_FILE
from pipeline.utils.files import replace_text
from pipeline.utils.versions import versions


def environment() -> dict[str, Any]:
    """Facts of the machine and the packages that this start runs on."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
    }


def write_environment(folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Record what this start runs on. Returns what was another when the run was last started, as in
    `torch 2.12.0 -> 2.13.0`."""
    file = folder / ENVIRONMENT_FILE
    before: Any = {}
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(file.read_text("utf-8"))
    replace_text(file, json.dumps(facts, indent=1) + "\n")
    then, now = _versions_in(before), _versions_in(facts)
    return [
        f"{name} {then.get(name, 'not there')} -> {now.get(name, 'not there')}"
        for name in sorted(then.keys() | now.keys())
        if then and then.get(name) != now.get(name)
    ]


def _versions_in(facts: Any) -> dict[str, str]:
    """Package -> version; empty where the record is missing or malformed."""
    packages = facts.get("packages") if isinstance(facts, dict) else None
    if not isinstance(packages, dict):
        return {}
    found = {"python": facts.get("python"), **packages}
    return {name: version for name, version in found.items() if isinstance(version, str)}
