"""`pipe plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.hardware_options import asked_for, machine_options
from pipeline.errors import NoFit, PipeError, UsageError, in_words, system_errors_as
from pipeline.plan.registry import Registry
from pipeline.utils.files import try_writing

if TYPE_CHECKING:
    from pipeline.planning.search import Candidate

FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@machine_options
@click.option("--trace", is_flag=True, help="Run the actual model on tensors without memory, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--out", type=FILE, help="Save the plan, for `pipe run --plan`.")
@click.pass_obj
def plan(
    registry: Registry | None,
    /,
    recipe: str,
    overrides: tuple[str, ...],
    trace: bool,
    as_json: bool,
    out: Path | None,
    **hardware: Any,
) -> None:
    """Tell what RECIPE will need: memory in every phase, disk, network, time.

    The model's blocks are run once on tensors without memory: no GPU, no weights, no network beyond
    the model's config. With --trace the actual strategy is run so too.
    Exit code 3 when it does not fit.

    OVERRIDES change the recipe first, as in train.micro_batch_size=2.
    """
    from pipeline.distributed.signals import stoppable
    from pipeline.planning import choice
    from pipeline.planning.memory_plan import estimate_plan
    from pipeline.planning.presets import in_order
    from pipeline.planning.report import lines
    from pipeline.planning.search import SearchBase

    machines, margins = asked_for(**hardware)
    with system_errors_as(UsageError):
        try_writing(out) if out else None
    known = registry or Registry.installed()
    file = Path(recipe)
    base = SearchBase(
        recipe=file, overrides=overrides, machines=machines, margins=margins, registry=known
    )
    with stoppable():
        # A plan without a trace may be among what would make it fit, and is memory_plan up once.
        memory_plan = (
            estimate_plan(base.checked({}), machines, margins, trace=True)
            if trace
            else base.memory_plan({})
        )
    record: dict[str, Any] = memory_plan.record()
    if out is not None:
        with system_errors_as(UsageError):
            out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", "utf-8")
    if not as_json:
        click.echo("\n".join(lines(memory_plan)))
    found: list[Candidate] | None = None
    try:
        found = [*choice.remedies(memory_plan, base, in_order(known))] if memory_plan.short else []
    except PipeError as error:
        click.echo(f"what would make it fit cannot be told: {in_words(error)}", err=True)
    if as_json:
        remedies = None if found is None else [*map(choice.record, found)]
        click.echo(json.dumps(record | {"remedies": remedies}, allow_nan=False))
    elif memory_plan.short and found is not None:
        said = "it would fit with" if found else "nothing here makes it fit"
        click.echo("\n".join([said, *(f"  {choice.line(way)}" for way in found)]))
    if memory_plan.short:
        sys.exit(NoFit.exit_code)
