"""`pipe ls`."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pipeline.commands.options import json_option
from pipeline.errors import JournalDamaged, UsageError, in_words
from pipeline.utils.terminal import shown
from pipeline.utils.text import plural

DEFAULT = "runs"


@click.command("ls")
@click.argument("runs", type=click.Path(path_type=Path), default=DEFAULT)
@json_option
def ls(runs: Path, as_json: bool) -> None:
    """List the runs in the folder RUNS, by default ./runs; the newest is last."""
    from pipeline.execution import rundir

    if (runs / rundir.RECIPE).is_file() and (runs / rundir.JOURNAL).exists():
        raise UsageError(f"{runs} is a run", hint=f"pipe status {shlex.quote(str(runs))}")
    if not runs.is_dir() and runs != Path(DEFAULT):
        raise UsageError(f"{runs}: no such folder")
    closed: list[Path] = []
    found = sorted(_runs(runs, closed), key=lambda run: run["started"])
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for run in found:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started"]))
        loss = "" if run["loss"] is None else f"loss {run['loss']:.4f}"
        slot = "" if run["slot"] is None or run["state"] == "finished" else f"in {run['slot']}"
        of = f"{run['training']} " if run["training"] else ""
        step = "" if run["step"] is None else f"{of}step {run['step']}"
        best = run["best"]
        best = best and f"held out {best['eval_loss']:.4f} at step {best['step']} (best)"
        early = run["ended_early"] and f"ended early: {run['ended_early']}"
        fields = (started, f"{run['state']:<9}", run["folder"], step, loss, best, slot, early)
        click.echo("  ".join(field for field in fields if field))
        if run["damage"]:
            click.echo(f"  {run['damage']}", err=True)
    if closed:
        click.echo(f"{plural(len(closed), 'folder')} of others cannot be read", err=True)
    elif not found:
        click.echo(f"no runs in {runs}", err=True)


def _runs(root: Path, closed: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield descriptions of runs; add the folders to `closed` that others have not opened. A run
    that cannot be read is not a reason to list no other."""
    from pipeline.execution import rundir

    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            if (folder / rundir.RECIPE).is_file():
                yield _described(folder)
        except PermissionError:
            closed.append(folder)
        except Exception as error:
            nothing = dict.fromkeys(("slot", "training", "step", "loss", "best", "ended_early"))
            started = folder.stat().st_mtime
            said = {"state": "damaged", "damage": in_words(error), "started": started}
            yield {"folder": str(folder), **said, **nothing}


def _described(folder: Path) -> dict[str, Any]:
    from pipeline.contracts.metrics import is_record
    from pipeline.execution import rundir
    from pipeline.execution.journal import Journal
    from pipeline.execution.run_state import RunState, Training
    from pipeline.utils.jsonl import read_tail
    from pipeline.view.run import ended

    state, damage = RunState(), None
    try:
        state = Journal(folder / rundir.JOURNAL).state()
    except JournalDamaged as error:
        damage = str(error)
    newest = RunState.of(one for one in read_tail(folder / rundir.METRICS) if is_record(one))
    training = next(reversed(newest.trainings.values()), Training())
    now = "running" if rundir.is_locked(folder) else ended(folder, state)
    slots = [event["slot"] for event in state.events if event["event"] == "slot started"]
    return {
        "folder": str(folder),
        "state": "damaged" if damage else now,
        "damage": damage,
        "started": state.events[0]["time"] if state.events else folder.stat().st_mtime,
        "slot": slots[-1] if slots else None,
        "step": training.step.get("step"),
        "loss": training.step.get("loss"),
        "training": training.slot or None,
        "best": training.best,
        "ended_early": shown(training.ended_early) or None,
    }
