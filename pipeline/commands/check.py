"""`pipe check` and `pipe plan`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pipeline.chain.plan import Plan, unpinned
from pipeline.commands import options
from pipeline.commands.options import flag
from pipeline.errors import (
    BadRows,
    DataError,
    NoFit,
    PipeError,
    Problem,
    RecipeError,
    StageError,
    UsageError,
    in_words,
    system_errors_as,
)
from pipeline.importing.translator import plan_recipe
from pipeline.utils import terminal
from pipeline.utils.files import check_writable
from pipeline.utils.terminal import set_display
from pipeline.utils.text import plural

if TYPE_CHECKING:
    from pipeline.planning.search import Candidate


@click.command()
@options.recipe
@flag("--data", "with_data", "Also read and tokenise all rows, into the cache that a run uses.")
@options.as_json
@options.pinned
@options.trust
def check(recipe: Path, overrides: tuple[str, ...], with_data: bool, as_json: bool) -> None:
    """Check RECIPE for mistakes, without running it.

    OVERRIDES change the recipe first, such as train.steps=50 wrap.use=wrap.ddp. No weights are
    read.
    """
    try:
        plan = plan_recipe(recipe, overrides, registry=options.registry())
    except RecipeError as error:
        if not as_json:
            raise
        _fail({"ok": False, "problems": [*map(_facts, error.problems)]})
    notes = list(unpinned(plan.recipe, plan.view.slots))
    report: dict[str, object] = {
        "ok": True, "name": plan.recipe.name,
        "stages": [{"slot": planned.slot, "use": planned.use} for planned in plan.slots],
        "problems": [], "warnings": [*map(_facts, plan.warnings)], "notes": [*map(_facts, notes)],
    }  # fmt: skip
    log, lines = _DataLog(shown=not as_json), list[str]()
    said = [f"warning: {one}" for one in plan.warnings] + [f"note: {one}" for one in notes]
    for line in said if not as_json else ():
        click.echo(line, err=True)
    if with_data:
        try:
            data, lines = _read_data(plan, log)
        except StageError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error, DataError):
                raise  # of the machine
            if not as_json:
                raise UsageError(str(error)) from error
            _fail(_bad_data(error, log))
        report["data"] = data | {"warnings": log.warnings}
    chain = " -> ".join(planned.use for planned in plan.slots)
    ok = f"ok: {plan.recipe.name}: {plural(len(plan.slots), 'stage')}: {chain}"
    click.echo(json.dumps(report) if as_json else "\n".join([ok, *lines]))


def _fail(report: dict[str, object]) -> NoReturn:
    click.echo(json.dumps(report))
    sys.exit(UsageError.exit_code)


def _read_data(plan: Plan, log: _DataLog) -> tuple[dict[str, Any], list[str]]:
    """Return facts of the data for programs, and a line for people for each slot of data, once it
    has given a sample."""
    from pipeline.execution.in_process import previews

    with previews(plan, log.logger) as shown:
        for one in shown.values():
            one.indices(1)  # a stream is read only when it is asked
        facts = {slot: one.facts() for slot, one in shown.items()}
        several = len(shown) > 1
        data = next(iter(facts.values())) | ({"slots": facts} if several else {})
        names = shown if several else ["data"]
        summaries = (one.summary() for one in shown.values())
        return data, [f"{n}: {text}" for n, text in zip(names, summaries, strict=True)]


class _DataLog(logging.Handler):
    """Messages of the stages: on stderr if `shown`; the warnings are kept."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__(logging.INFO)
        self.warnings: list[str] = []
        self._shown = shown
        self.logger = logging.Logger("pipe.check", logging.INFO)
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = terminal.shown(record.getMessage())
        warns = record.levelno >= logging.WARNING
        if warns:
            self.warnings.append(text)
        if self._shown:
            click.echo(f"warning: {text}" if warns else text, err=True)


def _bad_data(error: StageError, log: _DataLog) -> dict[str, object]:
    """Return what is wrong with the data: the first bad rows as problems, and counts by kind."""
    rows = error.rows if isinstance(error, BadRows) else ()
    if isinstance(error, DataError):
        rows = (error,)
    problems: list[dict[str, object]] = [
        {"file": one.file, "line": one.row, "column": None, "key": "data", "message": one.message,
         "hint": one.hint}
        for one in rows
    ] or [_facts(Problem(message=str(error), key="data"))]  # fmt: skip
    kinds = error.kinds if isinstance(error, BadRows) else {}
    return {"ok": False, "problems": problems, "kinds": kinds, "warnings": log.warnings}


def _facts(problem: Problem) -> dict[str, object]:
    place = problem.location
    line, column = (place.line, place.column) if place and place.line else (None, None)
    return {
        "file": place and place.file, "line": line, "column": column, "key": problem.key,
        "message": problem.message, "hint": problem.hint,
    }  # fmt: skip


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
    from pipeline.chain.plan import resolved
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
