"""`pipe check`."""

from __future__ import annotations

import json
import sys

import click

from pipeline.chain.plan import Plan, plan_file
from pipeline.chain.registry import Registry
from pipeline.commands.completion import OVERRIDE, RECIPE
from pipeline.commands.trust import trust_options
from pipeline.errors import Problem, RecipeError
from pipeline.utils.text import plural


@click.command()
@click.argument("recipe", shell_complete=RECIPE)
@click.argument("overrides", nargs=-1, shell_complete=OVERRIDE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
@trust_options
def check(
    registry: Registry | None, recipe: str, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Find every mistake in RECIPE before running.

    OVERRIDES change values first: train.steps=50 wrap.use=wrap.ddp
    """
    try:
        plan = plan_file(recipe, overrides, registry=registry)
    except RecipeError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": [_problem(p) for p in error.problems]}))
        sys.exit(error.exit_code)
    if not as_json:
        for warning in plan.warnings:
            click.echo(f"warning: {warning}", err=True)
    click.echo(json.dumps(_summary(plan)) if as_json else _line(plan))


def _line(plan: Plan) -> str:
    chain = " -> ".join(step.use for step in plan.steps)
    return f"ok: {plan.recipe.name}: {plural(len(plan.steps), 'stage')}: {chain}"


def _summary(plan: Plan) -> dict[str, object]:
    steps = [{"slot": step.slot, "use": step.use} for step in plan.steps]
    warnings = [_problem(warning) for warning in plan.warnings]
    facts = {"ok": True, "name": plan.recipe.name, "stages": steps}
    return {**facts, "problems": [], "warnings": warnings}


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
