"""`pipe doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeline.commands import options
from pipeline.commands.options import GPUS, flag, option
from pipeline.errors import MachineUnfit, UsageError, system_errors_as
from pipeline.utils.files import check_writable
from pipeline.utils.text import plural


@click.command("doctor")
@option("--procs", "Number of processes.", type=GPUS, show_default="one per GPU; 2 without GPUs")
@flag("--quick", "Measure fewer sizes, in less time.")
@option(
    "--folder",
    "Folder in which runs will be written.",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    show_default="./runs, or the current folder",
)
@options.out("JSON file to write too.")
@options.as_json
def doctor(
    procs: int | None, as_json: bool, out: Path | None, quick: bool, folder: Path | None
) -> None:
    """Measure this machine and list what will fail or be slow.

    Checks devices, topology, versions, limits and folders. Measures all-reduce and all-gather by
    size, matrix products, copies and the disk; takes less than a minute on a small machine. Exit
    code 5 if training will fail here.
    """
    from pipeline.distributed.signals import stoppable
    from pipeline.doctor.examine import examine
    from pipeline.doctor.rules import findings
    from pipeline.doctor.show import lines

    place = folder or (Path("runs") if Path("runs").is_dir() else Path())
    with stoppable(), system_errors_as(UsageError):
        if out is not None:
            check_writable(out)
        machine = examine(place, procs=procs, quick=quick)
        found = findings(machine)
        report = {**machine.model_dump(), "findings": [finding.model_dump() for finding in found]}
        text = json.dumps(report, indent=1)
        click.echo(text if as_json else "\n".join(lines(machine, found)))
        if out is not None:
            out.write_text(text + "\n", "utf-8")
    errors = [finding.name for finding in found if finding.severity == "error"]
    if errors:
        names = ", ".join(dict.fromkeys(errors))
        raise MachineUnfit(f"training will fail here: {plural(len(errors), 'error')} ({names})")
