"""Raw results: one JSON file for each measurement, with what it takes to judge and repeat it.

A file has `benchmark`, `date`, `machine` (no host names), `versions`, `commands`, `origin`
(`measured`, or where its numbers were transcribed from) and `rows`; some have totals next to them.
`page.py` makes docs/results.md from those in `results/`.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.utils.packages import PACKAGES, versions

RESULTS = Path(__file__).parent / "results"
HERE = Path(__file__).parents[1]
FURTHER = ("peft", "torchao", "datasets", "tokenizers")
KEYS = ("benchmark", "date", "machine", "versions", "commands", "origin", "rows")
"""Keys of every file."""


def write(file: Path, benchmark: str, rows: Sequence[Any], **totals: Any) -> None:
    """Write the rows of a measurement that this process has made, and its totals."""
    file.write_text(json.dumps(described(benchmark) | totals | {"rows": rows}, indent=1) + "\n")


def read(name: str) -> dict[str, Any]:
    """Return a file of `results/` by its name without `.json`."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def described(benchmark: str) -> dict[str, Any]:
    """Return what a file says apart from its numbers."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions((*PACKAGES, *FURTHER))},
        "commands": [command()],
        "origin": "measured",
    }


def machine() -> dict[str, Any]:
    """Return the processor, the cores that this process may use, the memory in GiB and the GPUs."""
    found = re.search(r"^model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text("utf-8"), re.M)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": found[1] if found else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / (1 << 30)),
        "gpus": gpus(),
    }


def gpus() -> list[str]:
    """Return the names of this machine's GPUs. Asks the driver's tool: CUDA in this process would
    take memory of the device that is measured."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()


def command() -> str:
    """Return the command of this process as it is typed in the repository, without the option
    that names the file of results."""
    program, *words = sys.argv
    path = Path(program).resolve()
    if path.is_relative_to(HERE):
        path = path.relative_to(HERE)
    kept = list(words)
    for option in ("--json", "--out"):
        if option in kept:
            place = kept.index(option)
            del kept[place : place + 2]
    return shlex.join(["python", str(path), *kept])
