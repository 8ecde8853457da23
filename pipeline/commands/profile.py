"""`pipe profile`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import (
    FOLDER,
    display_options,
    overrides_argument,
    recipe_argument,
    trust_options,
)
from pipeline.errors import UsageError, system_errors_as
from pipeline.utils.files import replace_text
from pipeline.utils.text import align

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan
    from pipeline.distributed.launch import LaunchInfo
    from pipeline.view.display import Display

SHARES = ("compute", "communication", "data", "idle")


def _steps(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    found = re.fullmatch(r"([1-9]\d{0,5})(?:-([1-9]\d{0,5}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not first <= last < first + 20:
        raise click.BadParameter(f"{text} is neither a step nor a range of at most 20, as in 4-6")
    return tuple(range(first, last + 1))


@click.command("profile")
@recipe_argument
@overrides_argument
@click.option("--steps", callback=_steps, default="4-6", show_default=True, help="Steps to record.")
@click.option("--run-dir", type=FOLDER, help="Folder of the run.")
@display_options
@trust_options
def profile(
    recipe: Path,
    overrides: tuple[str, ...],
    steps: tuple[int, ...],
    run_dir: Path | None,
    display: Display,
) -> None:
    """Record a few training steps of RECIPE with torch.profiler and show where their time goes.

    Each rank writes a trace for https://ui.perfetto.dev and, on GPUs, a memory snapshot into the
    folder `profile` of the run.
    """
    from pipeline.bench.trials import profiled_recipe, say_which
    from pipeline.chain.plan import plan_file
    from pipeline.contracts.metrics import records
    from pipeline.distributed.launchers import require_no_launcher
    from pipeline.execution import rundir
    from pipeline.importing.unknown_keys import plan_recipe
    from pipeline.launch.job import Job
    from pipeline.launch.start import start

    require_no_launcher("pipe profile")
    original = plan_recipe(recipe, overrides, for_this_machine=True)
    say_which(original)
    runs = Path("runs")
    if run_dir is not None and (run_dir / rundir.RECIPE).exists():
        raise UsageError(f"{run_dir} already holds a run", hint="name a new folder")
    folder = rundir.claim(run_dir) if run_dir else rundir.create(runs, "profile")
    with system_errors_as(UsageError):
        file = folder / "profile.yaml"
        replace_text(file, profiled_recipe(original, steps))

    def plan(started: LaunchInfo) -> Plan:
        return plan_file(file, for_this_machine=True, started=started)

    start(Job(plan=plan, folder=lambda _: folder.resolve(), display=display))
    recorded = [one for one in records(folder / rundir.METRICS) if one.get("profiled")]
    rows = [["step", "seconds", *SHARES]]
    for record in recorded:
        shares = [record.get(f"{name}_share") for name in SHARES]
        cells = ["?" if share is None else f"{share:.1%}" for share in shares]
        rows.append([str(record["step"]), f"{record['step_seconds']:.3f}", *cells])
    click.echo("\n".join(align(rows, left=0)))
    click.echo(f"traces: {folder / 'profile'}")
