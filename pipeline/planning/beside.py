"""The plan of a run that is starting, made in a process next to it, which gets the RunSpec and the
numbers of processes as a message (`pipeline.utils.processes`).

The run's display and report compare what is measured with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.chain.plan import Plan
from pipeline.distributed.settings import ProcessCounts
from pipeline.errors import PipeError
from pipeline.execution import rundir
from pipeline.execution.run_spec import RunSpec
from pipeline.hardware.gpus import GIB, find_accelerator
from pipeline.hardware.telemetry import Telemetry
from pipeline.planning.hardware import HardwareOptions, Margins
from pipeline.planning.memory_plan import MemoryPlan, estimate_plan
from pipeline.planning.report import lines
from pipeline.utils.files import replace_text
from pipeline.utils.processes import received, start_child


@contextlib.contextmanager
def planned_beside(plan: Plan, folder: Path) -> Iterator[None]:
    """Plan the run in `folder` in a separate process while the body runs it. Without a plan of
    memory, whatever the reason, the run is shown without it."""
    process = None
    silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with contextlib.suppress(OSError):
        spec = RunSpec.of(plan, folder).dump()
        message = {"spec": spec, "procs": plan.view.procs, "per_node": plan.per_node}
        process = start_child("pipeline.planning.beside", message, str(folder), **silent)
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def estimated(plan: Plan) -> MemoryPlan:
    """Return the memory plan of a recipe on nodes like this one: with its GPUs by the data sheet,
    or, of a kind that is not known, with the memory that the driver says. Raises PipeError where
    there can be none."""
    machines = HardwareOptions()
    if plan.view.device != "cpu":
        telemetry = Telemetry()
        known = None if telemetry.kind is None else find_accelerator(telemetry.kind)
        sizes = [one.memory_total_bytes for one in telemetry.read()[:1] if known is None]
        machines = HardwareOptions(
            gpus=plan.per_node,
            nodes=plan.view.procs // plan.per_node,
            gpu=None if known is None else known.name,
            memory=sizes[0] / GIB if sizes and sizes[0] else None,
        )
    return estimate_plan(plan, machines, Margins())


def record(found: MemoryPlan) -> dict[str, Any]:
    """Return what displays and reports take of a plan, as JSON."""
    on_gpus = found.topology.device != "cpu"
    return {
        "needed_bytes": found.needed if on_gpus else None,
        "host_bytes": found.estimate.host_peak,
        "lines": list(lines(found)),
    }


def main(spec: RunSpec, procs: int, per_node: int) -> int:
    """Write the plan of a run on so many processes into its folder. Returns the exit code."""
    os.nice(19)  # the run's own processes come first
    started = ProcessCounts(procs=procs, per_node=per_node, nodes=procs // per_node)
    try:
        found = estimated(spec.plan(started))
    except PipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    replace_text(Path(spec.run_dir) / rundir.PLAN, json.dumps(record(found), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    given = received(sys.argv[1])
    sys.exit(main(RunSpec.load(given["spec"]), given["procs"], given["per_node"]))
