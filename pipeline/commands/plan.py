"""`pipe plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands import options
from pipeline.commands.options import flag
from pipeline.errors import NoFit, PipeError, UsageError, in_words, system_errors_as
from pipeline.utils.files import check_writable
from pipeline.utils.terminal import set_display

if TYPE_CHECKING:
    from pipeline.planning.search import Candidate


@click.command()
@options.recipe
@options.machine
@flag("-q", "--quiet", "Print only whether it fits.")
@options.out("Plan to write, for `pipe run --plan`.")
@options.as_json
@options.pinned
@options.trust
def plan(
    recipe: Path, overrides: tuple[str, ...], quiet: bool, as_json: bool, out: Path | None,
    **hardware: Any,
) -> None:  # fmt: skip
    """Predict memory in every phase, disk, network and time of RECIPE.

    Runs each kind of block once on tensors without memory: needs no GPU, no weights, and no network
    except for the model's config, and for the commits of hub names that --out keeps in the plan.
    Exit code 3 if the recipe does not fit.

    OVERRIDES change the recipe first, such as train.micro_batch_size=2.
    """
    from pipeline.chain.commits import resolved
    from pipeline.distributed.signals import stoppable
    from pipeline.planning.memory_plan import check, estimate_plan
    from pipeline.planning.report import lines

    if quiet and as_json:
        raise click.UsageError("--quiet excludes --json")
    if quiet:
        set_display("quiet")
    machines, margins = options.machines(**hardware)
    with system_errors_as(UsageError):
        check_writable(out) if out else None
    registry = options.registry()
    with stoppable():
        checked = check(recipe, overrides, machines, registry)
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
        from pipeline.planning.search import SearchBase, remedies

        base = SearchBase(
            recipe=recipe, overrides=overrides, machines=machines, margins=margins,
            registry=registry,
        )  # fmt: skip
        try:
            found = [*remedies(memory_plan, base)]
        except PipeError as error:
            click.echo(f"no remedies can be found: {in_words(error)}", err=True)
            found = None
        if not as_json and found is not None:
            title = "it would fit with" if found else "nothing here makes it fit"
            click.echo("\n".join([title, *(f"  {way.line()}" for way in found)]))
    if as_json:
        ways = None if found is None else [way.record() for way in found]
        click.echo(json.dumps(record | {"remedies": ways}, allow_nan=False))
    if memory_plan.short:
        sys.exit(NoFit.exit_code)
