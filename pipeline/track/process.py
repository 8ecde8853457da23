"""The process that feeds one tracker, started with a message (`pipeline.utils.processes`).

A word on standard input says how the run has ended; so does its end, when rank 0 has died. From
then on the process has that many seconds. Whatever it prints is shown as warnings.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import sys
import threading
from pathlib import Path

from pipeline.distributed.environment import started
from pipeline.distributed.signals import ignore_signals
from pipeline.execution.run_spec import RunSpec
from pipeline.track.contract import Outcome
from pipeline.track.feeder import Feeder, facts_of, failure, feeders
from pipeline.utils.processes import received
from pipeline.utils.terminal import hide_environment, redact_output

LOOK_SECONDS = 1.0
"""Seconds between two looks at the run's folder."""
OUTCOMES: dict[bytes, Outcome] = {b"finished": "finished", b"stopped": "stopped"}

Ending = queue.SimpleQueue[Outcome]


def main(spec: RunSpec, slot: str, seconds: float) -> int:
    """Feed the tracker of a slot to the end of the run. Returns the exit code."""
    ignore_signals()  # the run's end is what ends it
    # libraries print what nobody asked for, and what they start would keep it open
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    redact_output()
    hide_environment()
    ending, folder = listen(seconds), Path(spec.run_dir)
    try:
        plan = spec.plan(started())
        feeder = feeders(folder, plan)[slot]
        with feeder.alone():
            feeder.open(facts_of(folder, plan.recipe))
            follow(feeder, ending)
    except Exception as error:
        with contextlib.suppress(OSError):  # rank 0 may be gone
            rest = f"`pipe track {shlex.quote(str(folder))}` sends the rest"
            print(f"{failure(folder, slot, error)}; {rest}", file=said, flush=True)
        return 1
    return 0


def listen(seconds: float) -> Ending:
    """Return where the run's outcome will be. From then on the process has some seconds: the
    system ends it also in a call that never returns."""
    ending: Ending = queue.SimpleQueue()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def hear() -> None:
        word = os.read(0, 64).strip()  # sys.stdin could not be left alone at the end
        signal.setitimer(signal.ITIMER_REAL, seconds)
        ending.put(OUTCOMES.get(word, "failed"))

    threading.Thread(target=hear, name="pipe-ending", daemon=True).start()
    return ending


def follow(feeder: Feeder, ending: Ending) -> None:
    """Feed until the run has ended."""
    while True:
        try:
            outcome = ending.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            feeder.feed()
        else:
            feeder.close(outcome)
            return


if __name__ == "__main__":
    given = received(sys.argv[1])
    sys.exit(main(RunSpec.load(given["spec"]), given["slot"], given["seconds"]))
