"""The suite's GPU tests."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu import checkout

OPTIONS = [
    "-p",
    "no:cacheprovider",
    "-p",
    "no:benchmark",
    "-n",
    "4",
    "--dist",
    "loadfile",
    "-q",
    "-rfE",
    "-m",
    "gpu",
]


def gpu_tests(output: Path, seconds: float) -> dict[str, Any]:
    """Run the suite's GPU tests; returns the last lines that they print, and how long they took."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, "tests/gpu"]
    began, cut = time.monotonic(), []
    with output.open("wb") as file:
        try:
            subprocess.run(command, cwd=checkout.ROOT, timeout=seconds, stdout=file, stderr=file)
        except subprocess.TimeoutExpired:
            cut = ["cut short"]
    return {"seconds": time.monotonic() - began, "lines": [*last_lines(output), *cut]}


def last_lines(file: Path) -> list[str]:
    """Return the last lines of a text; nothing if it is not there."""
    return file.read_text("utf-8", "replace").splitlines()[-25:] if file.exists() else []
