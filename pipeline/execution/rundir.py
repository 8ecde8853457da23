"""The run's folder: its names, its creation, the lock that keeps a second process out, and what a
start leaves of its surroundings.

recipe.yaml       the merged recipe; `pipe resume` reads it
origins.json      where each of its values comes from: it no longer says which file or override
environment.json  versions and command of the newest start; the journal has every start's
engine.json       what really ran; engine-SLOT.json of each further training
journal.jsonl     stages started, finished, failed
metrics.jsonl     one record a step
hardware.jsonl    readings of the GPUs of the first node
memory.json       what training took of a GPU's memory
plan.json         what the recipe's plan says that a GPU needs
activity.json     what rank 0 is doing
logs/             rank-N.log
failures/         rank-N.json and rank-N.txt (the traceback) of the newest failure
stalls/           one folder for each stall: the stacks of all ranks and report.json
ray.json          the attempt of Ray's that runs, of a run under Ray
stop              asks its ranks to save and end
lock              held by the process that works in the folder
checkpoints/      step-NNNNNNNN; checkpoints-SLOT/ of each further training, by the slot that trains
checkpoints.at    where they are
export/           the exported model
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import platform
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import location
from pipeline.contracts.metrics import is_record, record_training
from pipeline.contracts.stage import ENVIRONMENT_FILE
from pipeline.errors import RunFailed, RunLocked, UsageError, in_words, kind_of, system_errors_as
from pipeline.recipe.nodes import walk
from pipeline.utils.files import GROUP_FOLDER, naming, opened, replace_text
from pipeline.utils.foreign import json_object, open_regular, read_tail, require_within
from pipeline.utils.hub import path_problems
from pipeline.utils.packages import versions
from pipeline.utils.terminal import shown
from pipeline.utils.text import near_path

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

RECIPE = location.RECIPE
JOURNAL = "journal.jsonl"
PLAN = "plan.json"
"""The plan of a run: `needed_bytes` of a GPU, `lines` for people."""
ORIGINS = "origins.json"
METRICS = "metrics.jsonl"
LEFT = ("checkpoints", "checkpoints.at", JOURNAL, METRICS)
"""Files of a run that a new run in the same folder would take for its own."""
LOCK = "lock"
STOP = "stop"
"""File by which ranks of an engine are asked to save and end; the signal that asked for it."""
LOCK_SECONDS = 1.0
"""Seconds to ask for the lock before another process is taken to hold it."""


def create(root: Path, name: str) -> Path:
    """A new folder `root/NAME-TIME`, readable by its owner only; UsageError if it cannot be."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder, attempt = root / f"{name}-{stamp}", 1
    while True:
        try:
            return _made(folder, exist_ok=False)
        except UsageError:
            if not folder.exists():
                raise
        attempt += 1
        folder = root / f"{name}-{stamp}-{attempt}"


def claim(folder: Path, *, fresh: bool = False) -> Path:
    """Use `folder`, given by the user, for a run: the one that it holds, or a new one. Raises
    UsageError as `require_free` does, and if the folder cannot be made."""
    require_free(folder, fresh=fresh)
    return folder if (folder / RECIPE).exists() else _made(folder, exist_ok=True)


def require_free(folder: Path, *, fresh: bool = False) -> None:
    """Raise UsageError if `folder` holds a run and another is `fresh`, and if it holds what another
    run has left, from which a new one would continue."""
    holds_run = (folder / RECIPE).exists()
    if holds_run and fresh:
        raise UsageError(f"{folder} already holds a run", hint="without --fresh that run continues")
    left = [] if holds_run else [name for name in LEFT if (folder / name).exists()]
    if left:
        raise UsageError(
            f"{folder} holds {left[0]} of another run, and no {RECIPE}",
            hint="name a new folder; to start from a checkpoint in this one, name that as the "
            "checkpoint slot's start_from",
        )


def _made(folder: Path, *, exist_ok: bool) -> Path:
    for problem in path_problems("", str(folder)):
        raise UsageError(problem.message, hint=problem.hint)
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok, mode=0o700)
    except OSError as error:
        raise kind_of(error)(f"cannot create {folder}: {error.strerror}") from error
    return folder


def existing(folder: Path) -> Path:
    """`folder` if it holds a run; raises UsageError if not, and if its recipe lies elsewhere."""
    if not (folder / RECIPE).is_file():
        raise UsageError(f"{folder} is not the folder of a run", hint=run_meant(folder))
    with system_errors_as(UsageError):
        require_within(folder / RECIPE, folder)
    return folder


def run_meant(folder: Path) -> str:
    """A hint for a path that is not the folder of a run."""
    if folder.is_file() and folder.suffix in (".yaml", ".yml"):
        return f"it is a recipe: pipe run {folder}"
    recipe, in_runs = folder.with_name(f"{folder.name}.yaml"), Path("runs") / folder
    named = (in_runs / RECIPE).is_file()
    if recipe.is_file() and not named:
        return f"{recipe} is a recipe: pipe run {recipe} starts a run, pipe ls lists runs"
    for above in folder.parents:
        if (above / RECIPE).is_file():
            return f"did you mean {above}, the run that it is part of?"
    if named and not folder.is_absolute():
        return f"did you mean {in_runs}?"
    if not folder.exists() and (near := near_path(folder) or near_path(Path("runs", folder.name))):
        return near
    for root in (folder, Path("runs")):
        with contextlib.suppress(UsageError):
            return f"the newest run in {root} is {newest(root)}"
    return "pipe run RECIPE starts a run"


def require_kept(folder: Path) -> None:
    """Raise RunFailed if the folder of the run that is under way has been deleted or moved."""
    if not (folder / RECIPE).exists():
        raise RunFailed(
            f"{folder} is gone: it was deleted or moved during the run, which cannot be "
            "continued there; bring it back and resume it, or start a new run"
        )


def newest(root: Path) -> Path:
    """The run in the folder `root` that was worked on last. Raises UsageError if there is none."""
    found = [file.parent for file in root.glob(f"*/{RECIPE}")]
    if not found:
        raise UsageError(f"there is no run in {root}", hint="name the folder of a run")
    worked_on = (
        max((run / name).stat().st_mtime for name in (RECIPE, JOURNAL) if (run / name).exists())
        for run in found
    )
    return max(zip(worked_on, found, strict=True))[1]


def open_to(folder: Path, group: str) -> None:
    """Let the members of a group read a run's folder and all that will be in it. Raises
    UsageError."""
    try:
        shutil.chown(folder, group=group)
        folder.chmod(GROUP_FOLDER)
    except (LookupError, OSError) as error:
        reason = in_words(error) if isinstance(error, OSError) else "there is no such group"
        raise UsageError(f"{folder} cannot be opened to the group {group}: {reason}") from error


def require_safe(folder: Path) -> None:
    """Raise UsageError for a folder that others can write in, or that is another user's."""
    facts = folder.stat()
    if facts.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"everybody can write in {folder}", hint=f"chmod o-w {shlex.quote(str(folder))}"
        )
    if os.geteuid() not in (0, facts.st_uid):
        raise UsageError(f"{folder} belongs to another user (number {facts.st_uid})")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run's lock. The system frees it when its owner dies, however it dies.

    Raises RunLocked while another live process holds it, UsageError if there can be no lock.
    """
    try:
        require_safe(folder)
        file = opened(folder / LOCK, "a+")
    except OSError as error:
        raise kind_of(error)(f"cannot write in {folder}: {in_words(error)}") from error
    with file:
        # a dying owner, and `pipe ls` looking, hold the lock for a moment
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    owner = file.read().strip() or "another process"
                    raise RunLocked(f"{folder} is in use by {owner}") from None
            except OSError as error:
                raise UsageError(
                    f"{file.name} cannot be locked ({error.strerror}), so that two processes could "
                    "write into one run",
                    hint="mount the file system with locks (Lustre: -o flock), or keep runs "
                    "elsewhere (--runs); their checkpoints can stay (`folder` in the checkpoint "
                    "slot)",
                ) from error
            time.sleep(0.05)
        with system_errors_as(UsageError), naming(folder / LOCK):
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}\n".encode())
        yield


def is_locked(folder: Path) -> bool:
    """Whether a live process works in this run folder. Raises UsageError if that cannot be seen."""
    path = folder / LOCK
    if not path.exists():
        return False
    with system_errors_as(UsageError):
        file = open_regular(path, within=folder)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # without locks no run can be here
            return False
    return False


def machine_facts() -> dict[str, Any]:
    """Facts of the machine and the packages that this start runs on."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [shown(word) for word in sys.argv],
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
    }


def write_environment(folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Record what this start runs on. Returns the versions that have changed since the previous
    start, as in `torch 2.12.0 -> 2.13.0`."""
    file = folder / ENVIRONMENT_FILE
    then, now = _versions_in(json_object(file, within=folder)), _versions_in(facts)
    replace_text(file, json.dumps(facts, indent=1) + "\n")
    return [
        f"{name} {then.get(name, 'not there')} -> {now.get(name, 'not there')}"
        for name in sorted(then.keys() | now.keys())
        if then and then.get(name) != now.get(name)
    ]


def _versions_in(facts: Mapping[str, Any]) -> dict[str, str]:
    """Package -> version; empty where the record is missing or malformed."""
    packages = facts.get("packages")
    found = {"python": facts.get("python"), **packages} if isinstance(packages, dict) else {}
    return {name: version for name, version in found.items() if isinstance(version, str)}


def write_origins(folder: Path, recipe: Recipe) -> None:
    """Record the origin of every value of the recipe that the run is started under. A value that is
    read from the run's own recipe keeps the origin that it had."""
    before, own, found = origins(folder), f"{folder / RECIPE}:", {}
    for path, node in walk(recipe.tree):
        name, text = ".".join(map(str, path)), str(node.at)
        found[name] = (text.startswith(own) and before.get(name)) or text
    replace_text(folder / ORIGINS, json.dumps(found, indent=1) + "\n")


def origins(folder: Path) -> dict[str, str]:
    """Dotted path -> `file:line:column` or the override that has set the value; empty for a run of
    an earlier version."""
    found = json_object(folder / ORIGINS, within=folder)
    return {path: str(origin) for path, origin in found.items()}


def saved_step(file: Path, training: str | None = None) -> int | None:
    """Step of the newest checkpoint of a training of the run whose `metrics.jsonl` it is, by
    default of the one that has written last: of those on this machine or, where there are none,
    as the last 64 KiB of the file say; None if there is none."""
    newest = [record for record in read_tail(file) if is_record(record)]
    if training is None:
        training = record_training(newest[-1]) if newest else ""
    found = location.newest_step(file.parent, training)
    saved = (
        int(one["step"])
        for one in reversed(newest)
        if "checkpoint_seconds" in one and record_training(one) == training
    )
    return next(saved, None) if found is None else found
