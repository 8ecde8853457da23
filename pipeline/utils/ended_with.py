"""A command that ends with the process PARENT, and everything that it has started with it:

python -m pipeline.utils.ended_with PARENT COMMAND...

ninja puts compilers in separate process groups, so whoever kills a rank or its launcher does not
reach them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from pipeline.utils.processes import kill_descendants, signal_with

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(parent: int, command: Sequence[str]) -> int:
    """Run the command until it or process `parent` ends. Returns the exit code."""
    for number in ENDING:
        signal.signal(number, _leave)
    signal_with(parent, signal.SIGTERM)
    with kill_descendants():
        # `kill_descendants` finds what is in another session
        code = subprocess.Popen(command, start_new_session=True).wait()
    return code if code >= 0 else 128 - code


def _leave(number: int, frame: FrameType | None) -> None:
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
