"""`pipe check`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import click

from pipeline.chain.names import unpinned
from pipeline.chain.plan import Plan
from pipeline.chain.registry import Registry
from pipeline.commands.options import (
    json_option,
    overrides_argument,
    pinned_option,
    recipe_argument,
    trust_options,
)
from pipeline.errors import BadRows, DataError, Problem, RecipeError, StageError, UsageError
from pipeline.importing.unknown_keys import plan_recipe
from pipeline.utils import terminal
from pipeline.utils.text import plural


@click.command()
@recipe_argument
@overrides_argument
@click.option(
    "--data",
    "with_data",
    is_flag=True,
    help="Also read and tokenise all rows, into the cache that a run uses.",
)
@json_option
@pinned_option
@click.pass_obj
@trust_options
def check(
    registry: Registry | None,
    recipe: Path,
    overrides: tuple[str, ...],
    with_data: bool,
    as_json: bool,
) -> None:
    """Check RECIPE for mistakes, without running it.

    OVERRIDES change the recipe first, such as train.steps=50 wrap.use=wrap.ddp. No weights are
    read.
    """
    try:
        plan = plan_recipe(recipe, overrides, registry=registry)
    except RecipeError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": [_problem(p) for p in error.problems]}))
        sys.exit(error.exit_code)
    if not as_json:
        for warning in plan.warnings:
            click.echo(f"warning: {warning}", err=True)
        for note in unpinned(plan.recipe, plan.view.slots):
            click.echo(f"note: {note}", err=True)
    if not with_data:
        click.echo(json.dumps(_summary(plan)) if as_json else _line(plan))
        return
    log = _DataLog(shown=not as_json)
    try:
        shown = _look(plan, log)
    except StageError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error, DataError):
            raise  # of the machine
        if not as_json:
            raise UsageError(str(error)) from error
        click.echo(json.dumps(_bad_data(error, log)))
        sys.exit(UsageError.exit_code)
    if as_json:
        first, *others = data = {slot: facts for slot, (facts, _) in shown.items()}
        more = {"slots": data} if others else {}
        facts = {**data[first], **more, "warnings": log.warnings}
        click.echo(json.dumps({**_summary(plan), "data": facts}))
        return
    click.echo(_line(plan))
    for slot, (_, summary) in shown.items():
        click.echo(f"{slot if len(shown) > 1 else 'data'}: {summary}")


def _look(plan: Plan, log: _DataLog) -> dict[str, tuple[dict[str, Any], str]]:
    """Facts of each data slot, for programs and for people, once it has given a sample."""
    from pipeline.execution.in_process import previews

    with previews(plan, log.logger) as shown:
        for one in shown.values():
            one.indices(1)  # a stream is read only when it is asked
        return {slot: (one.facts(), one.summary()) for slot, one in shown.items()}


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
    if isinstance(error, BadRows):
        rows, kinds = error.rows, error.kinds
    else:
        rows, kinds = (error,) if isinstance(error, DataError) else (), {}
    problems: list[dict[str, object]] = [
        {"file": one.file, "line": one.row, "column": None, "key": "data", "message": one.message,
         "hint": one.hint}
        for one in rows
    ]  # fmt: skip
    if not problems:
        problems = [_problem(Problem(message=str(error), key="data"))]
    return {"ok": False, "problems": problems, "kinds": kinds, "warnings": log.warnings}


def _line(plan: Plan) -> str:
    chain = " -> ".join(planned.use for planned in plan.slots)
    return f"ok: {plan.recipe.name}: {plural(len(plan.slots), 'stage')}: {chain}"


def _summary(plan: Plan) -> dict[str, object]:
    steps = [{"slot": planned.slot, "use": planned.use} for planned in plan.slots]
    warnings = [_problem(warning) for warning in plan.warnings]
    facts = {"ok": True, "name": plan.recipe.name, "stages": steps}
    notes = [_problem(note) for note in unpinned(plan.recipe, plan.view.slots)]
    return {**facts, "problems": [], "warnings": warnings, "notes": notes}


def _problem(problem: Problem) -> dict[str, object]:
    place = problem.location
    return {
        "file": place.file if place else None,
        "line": place.line if place and place.line else None,
        "column": place.column if place and place.line else None,
        "key": problem.key,
        "message": problem.message,
        "hint": problem.hint,
    }
