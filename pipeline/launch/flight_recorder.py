"""NCCL's flight recorder: the newest collectives of each rank, kept when one has stalled.

torch writes them when a byte comes through a rank's pipe
(https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html); `torchfrtrace` reads
the files, which are torch's own pickles.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from pipeline.utils.files import private_folder

FOLDER = "stalls/nccl"
"""Folder in the run's."""
ENTRIES = 2000
"""Collectives that each rank keeps in memory."""


def environment(run_dir: Path) -> dict[str, str]:
    """Variables with which ranks keep their newest collectives; what the user has set stays."""
    folder = run_dir / FOLDER
    wanted = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(ENTRIES),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{folder}/rank-",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{folder}/rank-",
    }
    if any(name in os.environ for name in wanted):
        return {}
    with contextlib.suppress(OSError):  # a full disk will be told by those who need it
        private_folder(run_dir / "stalls")
        private_folder(folder)
        return wanted
    return {}


def request(run_dir: Path, ranks: Iterable[int]) -> None:
    """Have the ranks write what they keep; those without a recorder are passed over."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            pipe = os.open(run_dir / FOLDER / f"rank-{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1")
            finally:
                os.close(pipe)
