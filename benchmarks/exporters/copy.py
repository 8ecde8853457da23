"""Copy a file of the same bytes: the speed that an export is compared with."""

from __future__ import annotations

import subprocess
from pathlib import Path

from apart.child import Job, Place, Work

from exporters.finish import flushed


def copy(job: Job, place: Place) -> Work:
    """Prepare `cp` of a file with the same bytes."""
    out = Path(job["out"])

    def call() -> None:
        subprocess.run(["cp", f"{job['input']}/model.safetensors", out], check=True)

    return flushed(call, out, place)
