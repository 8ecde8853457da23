"""Start the process that feeds a tracker, and end it with the run."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import IO

from pipeline.contracts.stage import Context
from pipeline.distributed.signals import Interrupted
from pipeline.errors import in_words
from pipeline.track.contract import Outcome
from pipeline.utils.process_tree import own_module


def start_feeder(ctx: Context, timeout: float) -> None:
    """Start the feeder of this slot's tracker on rank 0; it is told when the run ends, and gets
    `timeout` seconds then. A failure to start it is a warning."""
    if not ctx.dist.is_main:
        return
    try:
        process = subprocess.Popen(
            own_module("pipeline.track.feeder", str(ctx.run_dir), ctx.slot),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError as error:
        ctx.log.warning("%s: the tracker cannot be started: %s", ctx.slot, in_words(error))
        return
    assert process.stdin is not None
    assert process.stdout is not None
    listener = threading.Thread(target=_listen, args=(ctx, process.stdout), daemon=True)
    listener.start()
    stdin = process.stdin
    ctx.on_exit(lambda: _end(ctx, process, stdin, listener, timeout))


def _listen(ctx: Context, stdout: IO[str]) -> None:
    """Log what the feeder says as warnings."""
    slot = ctx.slot
    for line in stdout:
        ctx.log.warning("%s: %s", slot, line.rstrip())


def _end(
    ctx: Context,
    process: subprocess.Popen[str],
    stdin: IO[str],
    listener: threading.Thread,
    timeout: float,
) -> None:
    """Tell the feeder how the run has ended, and wait until it has sent everything."""
    try:
        stdin.write(f"{_outcome()}\n")
        stdin.close()
    except OSError:  # it has ended already, and said why
        pass
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        ctx.log.warning(
            "%s: not everything was sent in %g s; `pipe track %s` sends the rest",
            ctx.slot, timeout, ctx.run_dir,
        )  # fmt: skip
    listener.join(1.0)


def _outcome() -> Outcome:
    """Return how the run ends that is being left."""
    error = sys.exception()
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, Interrupted | SystemExit) else "failed"
