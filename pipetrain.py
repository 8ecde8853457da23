"""The installed name of the packages `pipeline` and `stages`, which a user's folder may have too.

`python -m pipetrain` is `pipe`. `python -m pipetrain -m MODULE ARGUMENTS...` runs one of the
project's own modules. Both find the packages that lie beside this file, whatever else the current
folder or PYTHONPATH offers under the same names. Importing this imports next to nothing, so that
signals find a handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType

HOME = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120
OWN = ("pipeline", "stages")

ENDING = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
"""As in `pipeline.distributed.signals`, which is not imported yet when they come."""
STOPPABLE = ("run", "resume", "export")
STOPPED = 75
"""Exit code of these commands when a signal has ended them (README)."""
RANK = "pipeline.execution.worker"


class OwnPackages:
    """A finder of `pipeline` and `stages` that knows one place."""

    def __init__(self) -> None:
        # Before this is asked for modules itself: it would be asked for this one.
        from importlib.machinery import PathFinder

        self._finder = PathFinder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """Return the spec of one of the two packages; None for any other module."""
        return self._finder.find_spec(name, [HOME]) if name in OWN else None


def main() -> None:
    """Run the command line, or the module that follows `-m`."""
    words = sys.argv[1:]
    command = words[0] if words else ""
    give_back = end_with_a_code(command) if command != "-m" else lambda: None
    if words[:2] == ["-m", RANK]:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the rank sees to its signals
    sys.meta_path.insert(0, OwnPackages())
    if command == "-m":
        import runpy

        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    from pipeline.cli import main as pipe

    if command not in STOPPABLE:
        give_back()
    pipe()


def end_with_a_code(command: str) -> Callable[[], None]:
    """End this process on a signal with the exit code that is documented for the command, until
    that has handlers of its own: nothing has been started that had to be ended first. Signals
    that are ignored (nohup) stay ignored. Returns what puts back the handlers that were there.
    """
    numbers = ENDING if command in STOPPABLE else ENDING[:3]
    before = {number: signal.getsignal(number) for number in numbers}
    taken = {n: handler for n, handler in before.items() if handler is not signal.SIG_IGN}

    def end(number: int, frame: FrameType | None) -> None:
        words = f"stopped by {signal.Signals(number).name}\n"
        with contextlib.suppress(OSError):  # a closed terminal
            os.write(2, words.encode())
        os._exit(STOPPED if command in STOPPABLE else 128 + number)

    def give_back() -> None:
        for number, handler in taken.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)

    for number in taken:
        signal.signal(number, end)
    os.register_at_fork(after_in_child=give_back)
    return give_back


if __name__ == "__main__":
    main()
