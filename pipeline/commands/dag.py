"""`pipe dag`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import json_option, overrides_argument, recipe_argument
from pipeline.utils.text import align

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan


@click.command("dag")
@recipe_argument
@overrides_argument
@click.option("--mermaid", is_flag=True, help="Print a Mermaid diagram, for GitHub or mkdocs.")
@json_option
def dag(recipe: Path, overrides: tuple[str, ...], mermaid: bool, as_json: bool) -> None:
    """Show which slots of RECIPE read each slot's result.

    RECIPE is a file, or the folder of a run.
    """
    from pipeline.execution import rundir
    from pipeline.importing.unknown_keys import plan_recipe

    plan = plan_recipe(recipe / rundir.RECIPE if recipe.is_dir() else recipe, overrides)
    if mermaid and as_json:
        raise click.UsageError("--mermaid excludes --json")
    drawn = _mermaid if mermaid else _json if as_json else _text
    click.echo("\n".join(drawn(plan)))


def _text(plan: Plan) -> Iterator[str]:
    rows = [("slot", "stage", "reads", "returns")]
    for step in plan.steps:
        named = plan.recipe.stages[step.slot].takes
        wires = [(name, slot) for name, slot in step.inputs.items() if slot is not None]
        reads = ", ".join(f"{name}: {slot}" if name in named else slot for name, slot in wires)
        rows.append((step.slot, step.use, reads, "" if step.gives is None else step.gives.__name__))
    return align(rows, left=4)


def _mermaid(plan: Plan) -> Iterator[str]:
    yield "flowchart LR"
    nodes = {step.slot: f"slot_{step.slot}" for step in plan.steps}  # `end` is a keyword
    for step in plan.steps:
        yield f'  {nodes[step.slot]}["{step.slot}<br><small>{step.use}</small>"]'
    for step in plan.steps:
        for slot in dict.fromkeys(filter(None, step.inputs.values())):
            given = next(other.gives for other in plan.steps if other.slot == slot)
            assert given is not None
            yield f"  {nodes[slot]} -- {given.__name__} --> {nodes[step.slot]}"


def _json(plan: Plan) -> Iterator[str]:
    slots = [
        {
            "slot": step.slot,
            "use": step.use,
            "inputs": dict(step.inputs),
            "takes": dict(plan.recipe.stages[step.slot].takes),
            "returns": step.gives and step.gives.__name__,
        }
        for step in plan.steps
    ]
    yield json.dumps({"schema_version": 1, "name": plan.recipe.name, "slots": slots}, indent=1)
