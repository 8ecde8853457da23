"""A command that fails before it has done anything leaves the run as it was: its settings, and what
lists and reports say of it."""

from __future__ import annotations

from pathlib import Path

from pipeline.contracts.stage import ENGINE_FILE, ENVIRONMENT_FILE, engine_file
from pipeline.errors import PipeError
from pipeline.execution import failures, origins, rundir
from pipeline.execution.journal import Journal
from pipeline.execution.metrics import is_record
from pipeline.utils import jsonl
from pipeline.utils.files import replace_bytes
from pipeline.utils.foreign import read_whole
from pipeline.view.history import PLAN_FILE

SETTINGS = (rundir.RECIPE, origins.FILE, ENVIRONMENT_FILE, ENGINE_FILE, PLAN_FILE)
"""Files that each command writes again."""
DONE = ("loss", "checkpoint_stall_seconds")
"""Keys of records of what is not undone: a step, a checkpoint."""
UNDONE = "  the run is as it was before this command, its recipe too"


class Before:
    """The settings of a run before a command."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._folder = folder
        further = (file.name for file in folder.glob(engine_file("*")))
        self._files = {name: _content(folder / name) for name in (*SETTINGS, *further)}
        self.recipe = self._files[rundir.RECIPE]
        """None before the run's first start."""

    def put_back(self) -> None:
        """Write them again, and have nobody count the failure. Raises OSError."""
        for name, content in self._files.items():
            if content is None:
                (self._folder / name).unlink(missing_ok=True)
            else:
                replace_bytes(self._folder / name, content)
        failures.undo(self._folder)


def _content(file: Path) -> bytes | None:
    return read_whole(file, within=file.parent) if file.exists() else None


def did_nothing(folder: Path) -> bool:
    """Whether the newest command, which has failed, is to be undone: it changed the settings of a
    run that was there, or the training refused to go on under them, and neither a step nor a
    checkpoint nor a durable result came of it. Raises OSError, JournalDamaged."""
    command = Journal(folder / rundir.JOURNAL).newest_command()
    starts = [event for event in command if event["event"] == "run started"]
    changed = starts[0].get("changed") if starts else None
    if changed is None or not (changed or failures.refused(folder)):
        return False
    results = [event for event in command if event["event"] == "slot finished" and event["record"]]
    newest = filter(is_record, jsonl.read_tail(folder / rundir.METRICS))
    since = starts[0]["time"]
    steps = [one for one in newest if any(key in one for key in DONE)]
    return not results and all((one.get("time") or 0.0) < since for one in steps)


def said(error: PipeError, folder: Path) -> None:
    """Have the error say that the run is as it was."""
    error.args = (f"{failures.without_continuation(str(error), folder)}\n{UNDONE}",)
