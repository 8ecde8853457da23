"""`pipe bench`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pipeline.chain.registry import Registry
from pipeline.commands.options import (
    FOLDER,
    Count,
    json_option,
    overrides_argument,
    recipe_argument,
    runs_option,
    trust_options,
)
from pipeline.errors import CommandStopped, UsageError, system_errors_as


@click.command("bench")
@recipe_argument
@overrides_argument
@click.option(
    "--strategies",
    metavar="A,B",
    show_default="the recipe's",
    help="Strategies to compare, such as ddp,fsdp,zero2.",
)
@click.option(
    "--procs",
    metavar="1,2,4",
    show_default="the recipe's",
    help="Numbers of processes to compare.",
)
@click.option("--steps", type=Count(min=1), default=6, show_default=True,
    help="Steps to measure.")  # fmt: skip
@click.option("--warmup", type=Count(min=0), default=2, show_default=True,
    help="Steps before the measured ones.")  # fmt: skip
@click.option("--timeout", type=Count(min=1), default=30, show_default=True,
    metavar="MINUTES", help="End a run that takes longer and start the next.")  # fmt: skip
@click.option(
    "--weak", is_flag=True, help="Keep samples per process constant, not the global batch."
)
@click.option("--run-dir", type=FOLDER, help="Folder of the benchmark.")
@runs_option("Folder in which to create the benchmark's folder bench-NAME-TIME.")
@click.option("--keep", is_flag=True, help="Keep the folders of all runs.")
@json_option
@click.pass_obj
@trust_options
def bench(
    registry: Registry | None,
    recipe: Path,
    overrides: tuple[str, ...],
    strategies: str | None,
    procs: str | None,
    steps: int,
    warmup: int,
    timeout: int,
    weak: bool,
    as_json: bool,
    run_dir: Path | None,
    runs: Path,
    keep: bool,
) -> None:
    """Measure a few steps of RECIPE under each strategy and number of processes; compare them.

    OVERRIDES change the recipe first, such as train.micro_batch_size=4. The runs follow one
    another, each in a new process, and end with one checkpoint.
    """
    from pipeline.bench import report, trials
    from pipeline.bench.session import Benchmark
    from pipeline.chain.plan import resolved
    from pipeline.distributed.launchers import require_no_launcher
    from pipeline.importing.unknown_keys import plan_recipe
    from pipeline.planning.presets import chosen

    require_no_launcher("pipe bench")
    registry = registry or Registry.installed()
    plan = resolved(plan_recipe(recipe, overrides, registry=registry), {})
    trials.require_measurable(plan)
    names = _parts(strategies, "--strategies")
    if names:
        trials.require_unchanged(plan, overrides)
    trials.say_which(plan)
    compared = chosen(names, registry) if names else [trials.own_strategy(plan)]
    counts = sorted({_count(text) for text in _parts(procs, "--procs")}) or [plan.view.procs]
    length = trials.BenchLength(steps=steps, warmup=warmup, weak=weak)
    session = Benchmark(
        plan=plan,
        length=length,
        trials=trials.write(plan, compared, counts, length, registry=registry),
        folder=_folder(run_dir, runs, plan.recipe.name),
        threads=trials.threads(plan, max(counts)),
        minutes=timeout,
        keep=keep,
        registry=registry,
    )
    rows, stopped = session.run(lambda rows: report.keep(session, rows))
    if rows:
        report.report(session, rows, stopped, json_only=as_json)
    if stopped:
        raise CommandStopped(stopped, f"stopped by {stopped.name}")
    if not any(row.measured for row in rows):
        sys.exit(1)


def _parts(text: str | None, option: str) -> list[str]:
    """The entries of a list separated by commas, each once."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{option} {text}: an empty entry", hint="separate names by single commas")
    return list(dict.fromkeys(parts))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--procs: `{text}` is not a number of processes", hint="such as 1,2,4")
    return int(text)


def _folder(run_dir: Path | None, runs: Path, name: str) -> Path:
    """The benchmark's folder, in which files and folders can be made."""
    from pipeline.bench.report import FILE
    from pipeline.bench.session import TRIALS
    from pipeline.execution import rundir

    folder = run_dir or rundir.create(runs, f"bench-{name}")
    with system_errors_as(UsageError):
        if (folder / FILE).exists() or (folder / TRIALS).exists():
            raise UsageError(f"{folder} already holds a benchmark")
        (folder / TRIALS).mkdir(parents=True)
        return folder.resolve()
