"""`pipe bench`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pipeline.registry import Registry


@click.command("bench")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--strategies",
    metavar="A,B",
    help="Strategies to compare, such as ddp,fsdp,zero2 (default: the recipe's own wrap slot).",
)
@click.option(
    "--procs",
    metavar="1,2,4",
    help="Numbers of processes on this machine (default: that of the recipe).",
)
@click.option("--steps", type=click.IntRange(min=1), default=6, show_default=True,
    help="Steps to measure.")  # fmt: skip
@click.option("--warmup", type=click.IntRange(min=0), default=2, show_default=True,
    help="Steps before them.")  # fmt: skip
@click.option("--weak", is_flag=True, help="Keep the samples per process, not the global batch.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--out", type=click.Path(path_type=Path),
    help="Folder for bench.json and bench.svg (default: runs/bench-NAME-TIME).")  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep the folders of all runs.")
@click.pass_obj
def bench(
    registry: Registry | None,
    recipe: Path,
    overrides: tuple[str, ...],
    strategies: str | None,
    procs: str | None,
    steps: int,
    warmup: int,
    weak: bool,
    as_json: bool,
    out: Path | None,
    keep: bool,
) -> None:
    """Run RECIPE for a few steps under each strategy and number of processes, and compare.

    OVERRIDES change the recipe, as in train.micro_batch_size=4. Each run is a process of its own,
    one after another: the recipe's data, model and optimizer, one checkpoint at the end, nothing
    after it.
    """
    from pipeline.bench.report import report
    from pipeline.bench.session import Session
    from pipeline.bench.trials import Length, own_strategy, require_measurable
    from pipeline.errors import UsageError
    from pipeline.launch.environment import is_worker
    from pipeline.plan import plan_file
    from pipeline.presets import chosen

    if is_worker():
        raise UsageError("pipe bench starts its own processes", hint="run it without torchrun")
    registry = registry or Registry.installed()
    plan = plan_file(recipe, overrides, registry=registry)
    require_measurable(plan)
    names = _parts(strategies, "--strategies")
    compared = chosen(names, registry) if names else [own_strategy(plan)]
    counts = sorted(_count(text) for text in _parts(procs, "--procs")) or [plan.view.procs]
    session = Session(
        plan=plan,
        length=Length(steps=steps, warmup=warmup, weak=weak),
        folder=_folder(out, plan.recipe.name),
        most=max(counts),
        keep=keep,
        registry=registry,
    )
    rows = session.run(compared, counts)
    report(session, rows, as_json=as_json)
    if not any(row.measured for row in rows):
        sys.exit(1)


def _parts(text: str | None, option: str) -> list[str]:
    """What commas separate, each once."""
    from pipeline.errors import UsageError

    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{option} {text}: an empty entry", hint="separate names by single commas")
    return list(dict.fromkeys(parts))


def _count(text: str) -> int:
    from pipeline.errors import UsageError

    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--procs: `{text}` is no number of processes", hint="such as 1,2,4")
    return int(text)


def _folder(out: Path | None, name: str) -> Path:
    from pipeline import rundir
    from pipeline.errors import UsageError, system_errors_as

    if out is None:
        return rundir.create(Path("runs"), f"bench-{name}").resolve()
    if (out / "bench.json").exists() or (out / "runs").exists():
        raise UsageError(f"{out} already holds a benchmark")
    with system_errors_as(UsageError):
        out.mkdir(parents=True, exist_ok=True)
    return out.resolve()
