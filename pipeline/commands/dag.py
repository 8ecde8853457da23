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
    for planned in plan.slots:
        named = plan.recipe.stages[planned.slot].takes
        wires = [(name, slot) for name, slot in planned.inputs.items() if slot is not None]
        reads = ", ".join(f"{name}: {slot}" if name in named else slot for name, slot in wires)
        rows.append(
            (
                planned.slot,
                planned.use,
                reads,
                "" if planned.gives is None else planned.gives.__name__,
            )
        )
    return align(rows, left=4)


def _mermaid(plan: Plan) -> Iterator[str]:
    yield "flowchart LR"
    nodes = {planned.slot: f"slot_{planned.slot}" for planned in plan.slots}  # `end` is a keyword
    for planned in plan.slots:
        yield f'  {nodes[planned.slot]}["{planned.slot}<br><small>{planned.use}</small>"]'
    for planned in plan.slots:
        for slot in dict.fromkeys(filter(None, planned.inputs.values())):
            given = next(other.gives for other in plan.slots if other.slot == slot)
            assert given is not None
            yield f"  {nodes[slot]} -- {given.__name__} --> {nodes[planned.slot]}"


def _json(plan: Plan) -> Iterator[str]:
    slots = [
        {
            "slot": planned.slot,
            "use": planned.use,
            "inputs": dict(planned.inputs),
            "takes": dict(plan.recipe.stages[planned.slot].takes),
            "returns": planned.gives and planned.gives.__name__,
        }
        for planned in plan.slots
    ]
    yield json.dumps({"schema_version": 1, "name": plan.recipe.name, "slots": slots}, indent=1)
