"""pipetrain from Python: run, resume and plan recipes, for notebooks, sweeps and other programs.

    from pipeline import plan, run

    for rate in (1e-5, 3e-5):
        outcome = run("recipe.yaml", [f"optimizer.lr={rate}"])
        print(rate, outcome.history().best)

A run is a separate process, as if `pipe run` had been called, so several can run at a time in
threads, and none changes the calling process."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pipeline.distributed.environment import STOPPED
from pipeline.errors import RunFailed, RunStopped, UsageError
from pipeline.execution import rundir
from pipeline.recipe.nodes import mapped

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan
    from pipeline.errors import Problem
    from pipeline.planning.memory_plan import MemoryPlan
    from pipeline.view.run import History

RecipeLike = str | Path | Mapping[str, Any]
"""A recipe's file, or its content; texts of a content that begin with `./` or `../` are paths
relative to the working directory."""
Listener = Callable[[Mapping[str, Any]], object]
"""Called with each event of a run, as `pipe run --json` writes them."""
LOG = logging.getLogger("pipe.api")
LAST_LINES = 40
"""Lines of a failed run's output that its error has."""


@dataclass(frozen=True)
class RunOutcome:
    """A run that has ended well."""

    folder: Path
    """The run's folder."""

    def __init__(self, folder: str | Path) -> None:
        object.__setattr__(self, "folder", Path(folder))

    def history(self) -> History:
        """Return everything that the folder says of the run: metrics, events, the best."""
        from pipeline.view.run import History

        return History(self.folder)

    @property
    def export(self) -> Path | None:
        """The exported model's folder, if there is one."""
        from pipeline.contracts.export import ExportedModel

        found, exports = self.results(), self._plan().giving(ExportedModel)
        return next((found[one.slot] for one in exports if one.slot in found), None)

    def results(self) -> dict[str, Path]:
        """Return slot -> place of its result, if it lies on this machine's disk."""
        from pipeline.execution.journal import Journal
        from pipeline.execution.resume import results

        return dict(results(self._plan(), Journal(self.folder / rundir.JOURNAL)))

    def _plan(self) -> Plan:
        from pipeline.chain.plan import plan_file

        return plan_file(self.folder / rundir.RECIPE, skip_checks=True)


def run(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    runs: str | Path = "runs",
    until: str | None = None,
    on_event: Listener | None = None,
) -> RunOutcome:
    """Run a recipe, and wait until it has ended.

    `overrides` are as on the command line, `train.steps=50`. `run_dir` is the run's folder; if it
    holds a run, that run is continued. Without it a folder is made in `runs`. `until` ends after a
    slot.
    Lines that the run prints go to the logger `pipe.api`. Ctrl-C stops the run, which saves
    everything, and is raised when it has.

    Raises RecipeError and UsageError before anything is started, RunFailed, and RunStopped when
    somebody else has stopped it; both have the run's `folder`.
    """
    from pipeline.execution.resume import Selection
    from pipeline.importing.translator import plan_recipe

    with _file_of(recipe) as file:
        made = plan_recipe(file, overrides, for_this_machine=True)
        Selection(last=until).require_known(made)  # a slot that is not there is a mistake
        folder = Path(run_dir) if run_dir else rundir.create(Path(runs), made.recipe.name)
        options = ["--run-dir", str(folder), *(["--until", until] if until else [])]
        _call(["run", str(file), *overrides, *options], folder, on_event)
    return RunOutcome(folder.resolve())


def resume(
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    *,
    recipe: RecipeLike | None = None,
    accept: Sequence[str] = (),
    on_event: Listener | None = None,
) -> RunOutcome:
    """Continue with a run, under another `recipe` if one is given, and wait until it has ended.

    `accept` names changes that are intended, as `pipe resume --accept`. Raises as `run` does.
    """
    from pipeline.importing.translator import plan_recipe

    folder = rundir.existing(Path(run_dir))
    own = folder / rundir.RECIPE
    options = [f"--accept={name}" for name in accept]
    with _file_of(own if recipe is None else recipe) as file:
        plan_recipe(file, overrides, for_this_machine=True)
        options += [] if recipe is None else [f"--recipe={file}"]
        _call(["resume", str(folder), *overrides, *options], folder, on_event)
    return RunOutcome(folder.resolve())


def plan(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    gpus: int | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    memory: float | None = None,
) -> MemoryPlan:
    """Predict what a recipe needs, as `pipe plan` does; `memory` is in GiB of a GPU.

    Raises RecipeError, and UsageError for GPUs that are not known.
    """
    from pipeline.planning.hardware import HardwareOptions, margins_for
    from pipeline.planning.memory_plan import check, estimate_plan

    machines = HardwareOptions(gpus=gpus, gpu=gpu, nodes=nodes, memory=memory)
    with _file_of(recipe) as file:
        checked = check(file, overrides, machines)
        margins = margins_for(machines.kind, record=None, overhead=None)
        return estimate_plan(checked, machines, margins)


def check(recipe: RecipeLike, overrides: Sequence[str] = ()) -> tuple[Problem, ...]:
    """Find every mistake of a recipe, as `pipe check` does, without starting anything; return its
    warnings. Raises RecipeError, with all `problems`."""
    from pipeline.importing.translator import plan_recipe

    with _file_of(recipe) as file:
        return tuple(plan_recipe(file, overrides).warnings)


@contextlib.contextmanager
def _file_of(recipe: RecipeLike) -> Iterator[Path]:
    """A recipe as a file, for as long as the body runs."""
    if isinstance(recipe, str | Path):
        yield Path(recipe)
        return
    with tempfile.TemporaryDirectory(prefix="pipe-") as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(json.dumps(mapped(recipe, _absolute), indent=1), "utf-8")
        yield file


def _absolute(value: Any) -> Any:
    """Return a value of a recipe, a relative path made absolute."""
    relative = isinstance(value, str) and value.startswith(("./", "../"))
    return str(Path(value).absolute()) if relative or isinstance(value, Path) else value


def _call(arguments: Sequence[str], folder: Path, on_event: Listener | None) -> None:
    """Call `pipe` with events as JSON. Raises UsageError, and RunFailed and RunStopped with the
    run's folder."""
    said: deque[str] = deque(maxlen=LAST_LINES)

    def collect(stderr: IO[str]) -> None:
        for line in stderr:
            said.append(line.rstrip())
            LOG.info("%s", line.rstrip())

    with subprocess.Popen(
        [sys.executable, "-P", "-m", "pipetrain", *arguments, "--json"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        encoding="utf-8", errors="replace",
        start_new_session=True,  # Ctrl-C is passed on once, not by the terminal too
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        listener = threading.Thread(target=collect, args=(process.stderr,), daemon=True)
        listener.start()
        try:
            for line in process.stdout:
                if on_event is not None:
                    on_event(json.loads(line))
        except BaseException:
            process.send_signal(signal.SIGINT)
            deque(process.stdout, maxlen=0)  # a full pipe would keep it from ending
            raise
        finally:
            process.wait()
            listener.join()
    if process.returncode == UsageError.exit_code:
        raise UsageError("\n".join(said))
    if process.returncode:
        kind = RunStopped if process.returncode == STOPPED else RunFailed
        error = kind("\n".join(said))
        error.folder = folder.resolve()
        raise error
