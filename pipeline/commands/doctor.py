"""`pipe doctor`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.hardware_options import GPUS

if TYPE_CHECKING:
    from pipeline.doctor.report import MachineReport
    from pipeline.doctor.rules.finding import Finding


@click.command("doctor")
@click.option("--procs", type=GPUS, help="Processes (default: one per GPU; without, two).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the JSON to this file too.",
)
@click.option("--quick", is_flag=True, help="Fewer sizes, for a shorter time.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where runs will be written (default: ./runs, if it is there, or the current folder).",
)
def doctor(
    procs: int | None, as_json: bool, out: Path | None, quick: bool, folder: Path | None
) -> None:
    """Measure this machine, and say what will hurt.

    Looks at devices, topology, versions, limits and folders; measures all-reduce and all-gather by
    size, matrix products, copies and the disk, in under a minute on a small machine. Exit code 5 if
    training will fail here.
    """
    from pipeline.distributed.signals import stoppable
    from pipeline.doctor.examine import examine
    from pipeline.doctor.rules import findings
    from pipeline.errors import UsageError, system_errors_as
    from pipeline.utils.files import try_writing

    place = folder or (Path("runs") if Path("runs").is_dir() else Path())
    with stoppable(), system_errors_as(UsageError):
        if out is not None:
            try_writing(out)
        machine = examine(place, procs=procs, quick=quick, say=_say)
        found = findings(machine)
        _show(machine, found, out, as_json=as_json)
    _judge(found)


def _say(measurement: str) -> None:
    click.echo(f"measuring: {measurement}", err=True)


def _show(
    machine: MachineReport, found: Sequence[Finding], out: Path | None, *, as_json: bool
) -> None:
    from pipeline.doctor.show import lines

    told = {
        **machine.model_dump(mode="json"),
        "findings": [dataclasses.asdict(finding) for finding in found],
    }
    text = json.dumps(told, indent=1)
    click.echo(text if as_json else "\n".join(lines(machine, found)))
    if out is not None:
        out.write_text(text + "\n", "utf-8")


def _judge(found: Sequence[Finding]) -> None:
    """Raise MachineUnfit if a finding is an error."""
    from pipeline.doctor.show import counted
    from pipeline.errors import MachineUnfit

    errors = [finding.name for finding in found if finding.severity == "error"]
    if errors:
        names = ", ".join(dict.fromkeys(errors))
        raise MachineUnfit(f"training will fail here: {counted(len(errors), 'error')} ({names})")
