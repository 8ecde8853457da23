"""`pipe plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.chain.registry import Registry
from pipeline.commands.hardware_options import asked_for, machine_options
from pipeline.commands.options import (
    json_option,
    out_option,
    overrides_argument,
    pinned_option,
    recipe_argument,
    trust_options,
)
from pipeline.errors import NoFit, PipeError, UsageError, in_words, system_errors_as
from pipeline.utils.files import check_writable
from pipeline.utils.terminal import set_display

if TYPE_CHECKING:
    from pipeline.planning.memory_plan import MemoryPlan
    from pipeline.planning.search import Candidate, SearchBase


@click.command()
@recipe_argument
@overrides_argument
@machine_options
@click.option("-q", "--quiet", is_flag=True, help="Print only whether it fits.")
@out_option("Plan to write, for `pipe run --plan`.")
@json_option
@pinned_option
@click.pass_obj
@trust_options
def plan(
    registry: Registry | None,
    /,
    recipe: Path,
    overrides: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    out: Path | None,
    **hardware: Any,
) -> None:
    """Predict memory in every phase, disk, network and time of RECIPE.

    Runs each kind of block once on tensors without memory: needs no GPU, no weights, and no network
    except for the model's config, and for the commits of hub names that --out keeps in the plan.
    Exit code 3 if the recipe does not fit.

    OVERRIDES change the recipe first, such as train.micro_batch_size=2.
    """
    from pipeline.chain.plan import resolved
    from pipeline.distributed.signals import stoppable
    from pipeline.planning.memory_plan import check, estimate_plan
    from pipeline.planning.report import lines

    if quiet and as_json:
        raise click.UsageError("--quiet excludes --json")
    if quiet:
        set_display("quiet")
    machines, margins = asked_for(**hardware)
    with system_errors_as(UsageError):
        check_writable(out) if out else None
    known = registry or Registry.installed()
    with stoppable():
        checked = check(recipe, overrides, machines, known)
        if out is not None:  # what is run under the plan names the same commits
            checked = resolved(checked, {})
        memory_plan = estimate_plan(checked, machines, margins)
    record = memory_plan.record() if out or as_json else {}
    if out is not None:
        with system_errors_as(UsageError):
            out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", "utf-8")
    if not as_json:
        shown = lines(memory_plan)
        click.echo(next(shown) if quiet else "\n".join(shown))
    found: list[Candidate] | None = []
    if memory_plan.short and not quiet:
        from pipeline.planning.search import SearchBase

        base = SearchBase(
            recipe=recipe, overrides=overrides, machines=machines, margins=margins, registry=known
        )
        found = _remedies(memory_plan, base)
        if not as_json and found is not None:
            title = "it would fit with" if found else "nothing here makes it fit"
            click.echo("\n".join([title, *(f"  {way.line()}" for way in found)]))
    if as_json:
        remedies = None if found is None else [way.record() for way in found]
        click.echo(json.dumps(record | {"remedies": remedies}, allow_nan=False))
    if memory_plan.short:
        sys.exit(NoFit.exit_code)


def _remedies(memory_plan: MemoryPlan, base: SearchBase) -> list[Candidate] | None:
    """Return what would fit; None, with the reason on standard error, if nothing can be tried."""
    from pipeline.planning.search import remedies

    try:
        return [*remedies(memory_plan, base)]
    except PipeError as error:
        click.echo(f"no remedies can be found: {in_words(error)}", err=True)
        return None
