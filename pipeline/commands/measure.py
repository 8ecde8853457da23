"""`pipe bench`, `pipe profile` and `pipe doctor`: measure a recipe, or this machine."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands import options
from pipeline.commands.options import FOLDER, GPUS, Count, flag, option
from pipeline.errors import CommandStopped, MachineUnfit, UsageError, system_errors_as
from pipeline.utils.files import check_writable, replace_text
from pipeline.utils.text import align, plural

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan
    from pipeline.distributed.settings import ProcessCounts
    from pipeline.view.screen import Display

SHARES = ("compute", "communication", "data", "idle")
"""Parts of a step's time."""


def _entries(context: click.Context, parameter: click.Parameter, text: str | None) -> list[str]:
    """The entries of a list separated by commas, each once."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if not all(parts):
        hint = "separate names by single commas"
        raise UsageError(f"{parameter.opts[0]} {text}: an empty entry", hint=hint)
    return list(dict.fromkeys(parts))


@click.command("bench")
@options.recipe
@option("--strategies", "Strategies to compare, such as ddp,fsdp,zero2.", metavar="A,B",
        show_default="the recipe's", callback=_entries)  # fmt: skip
@option("--procs", "Numbers of processes to compare.", metavar="1,2,4", show_default="the recipe's",
        callback=_entries)  # fmt: skip
@option("--steps", "Steps to measure.", type=Count(min=1), default=6)
@option("--warmup", "Steps before the measured ones.", type=Count(min=0), default=2)
@option("--timeout", "End a run that takes longer and start the next.", type=Count(min=1),
        default=30, metavar="MINUTES")  # fmt: skip
@flag("--weak", "Keep samples per process constant, not the global batch.")
@option("--run-dir", "Folder of the benchmark.", type=FOLDER)
@options.runs_folder("Folder in which to create the benchmark's folder bench-NAME-TIME.")
@flag("--keep", "Keep the folders of all runs.")
@options.as_json
@options.trust
def bench(
    recipe: Path, overrides: tuple[str, ...], strategies: list[str], procs: list[str], steps: int,
    warmup: int, timeout: int, weak: bool, run_dir: Path | None, runs: Path, keep: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure a few steps of RECIPE under each strategy and number of processes; compare them.

    OVERRIDES change the recipe first, such as train.micro_batch_size=4. The runs follow one
    another, each in a new process, and end with one checkpoint.
    """
    from pipeline.bench import report, trials
    from pipeline.bench.session import TRIALS, Benchmark
    from pipeline.chain.plan import resolved
    from pipeline.distributed.launchers import require_no_launcher
    from pipeline.execution import rundir
    from pipeline.importing.translator import plan_recipe
    from pipeline.planning.planner import chosen

    require_no_launcher("pipe bench")
    registry = options.registry()
    plan = resolved(plan_recipe(recipe, overrides, registry=registry), {})
    trials.require_measurable(plan, overrides if strategies else ())
    trials.say_which(plan)
    compared = chosen(strategies, registry) if strategies else [trials.own_strategy(plan)]
    wrong = [text for text in procs if not text.isdecimal() or int(text) < 1]
    if wrong:
        message = f"--procs: `{wrong[0]}` is not a number of processes"
        raise UsageError(message, hint="such as 1,2,4")
    counts = sorted({int(text) for text in procs}) or [plan.view.procs]
    length = trials.BenchLength(steps=steps, warmup=warmup, weak=weak)
    written = trials.write(plan, compared, counts, length, registry=registry)
    folder = run_dir or rundir.create(runs, f"bench-{plan.recipe.name}")
    with system_errors_as(UsageError):
        if (folder / report.FILE).exists() or (folder / TRIALS).exists():
            raise UsageError(f"{folder} already holds a benchmark")
        (folder / TRIALS).mkdir(parents=True)
    session = Benchmark(
        plan=plan, length=length, registry=registry, minutes=timeout, keep=keep,
        trials=written, folder=folder.resolve(), threads=trials.threads(plan, max(counts)),
    )  # fmt: skip
    rows, stopped = session.run(lambda rows: report.keep(session, rows))
    if rows:
        report.report(session, rows, stopped, json_only=as_json)
    if stopped:
        raise CommandStopped(stopped, f"stopped by {stopped.name}")
    if not any(row.measured for row in rows):
        sys.exit(1)


def _steps(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    found = re.fullmatch(r"([1-9]\d{0,5})(?:-([1-9]\d{0,5}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not first <= last < first + 20:
        raise click.BadParameter(f"{text} is neither a step nor a range of at most 20, as in 4-6")
    return tuple(range(first, last + 1))


@click.command("profile")
@options.recipe
@option("--steps", "Steps to record.", callback=_steps, default="4-6")
@option("--run-dir", "Folder of the run.", type=FOLDER)
@options.display
@options.trust
def profile(
    recipe: Path, overrides: tuple[str, ...], steps: tuple[int, ...], run_dir: Path | None,
    display: Display,
) -> None:  # fmt: skip
    """Record a few training steps of RECIPE with torch.profiler and show where their time goes.

    Each rank writes a trace for https://ui.perfetto.dev and, on GPUs, a memory snapshot into the
    folder `profile` of the run.
    """
    from pipeline.bench.trials import profiled_recipe, say_which
    from pipeline.chain.plan import plan_file
    from pipeline.contracts.metrics import records
    from pipeline.distributed.launchers import require_no_launcher
    from pipeline.execution import rundir
    from pipeline.importing.translator import plan_recipe
    from pipeline.launch.job import Job
    from pipeline.launch.start import start

    require_no_launcher("pipe profile")
    original = plan_recipe(recipe, overrides, for_this_machine=True)
    say_which(original)
    if run_dir is not None and (run_dir / rundir.RECIPE).exists():
        raise UsageError(f"{run_dir} already holds a run", hint="name a new folder")
    folder = rundir.claim(run_dir) if run_dir else rundir.create(Path("runs"), "profile")
    with system_errors_as(UsageError):
        file = folder / "profile.yaml"
        replace_text(file, profiled_recipe(original, steps))

    def plan(started: ProcessCounts) -> Plan:
        return plan_file(file, for_this_machine=True, started=started)

    start(Job(plan=plan, folder=lambda _: folder.resolve(), display=display))
    rows = [["step", "seconds", *SHARES]]
    for record in records(folder / rundir.METRICS):
        if record.get("profiled"):
            shares = [record.get(f"{name}_share") for name in SHARES]
            cells = ["?" if share is None else f"{share:.1%}" for share in shares]
            rows.append([str(record["step"]), f"{record['step_seconds']:.3f}", *cells])
    click.echo("\n".join(align(rows, left=0)))
    click.echo(f"traces: {folder / 'profile'}")


@click.command("doctor")
@option("--procs", "Number of processes.", type=GPUS, show_default="one per GPU; 2 without GPUs")
@flag("--quick", "Measure fewer sizes, in less time.")
@option("--folder", "Folder in which runs will be written.",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        show_default="./runs, or the current folder")  # fmt: skip
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
    from pipeline.doctor.report import lines
    from pipeline.doctor.rules import findings

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
