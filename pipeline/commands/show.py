"""`pipe show`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pipeline.errors import RecipeError
from pipeline.field_table import plain_value
from pipeline.marks import Path as Keys
from pipeline.plan import in_order, load_slots
from pipeline.recipe import Header, Recipe, read_recipe, unless_reported
from pipeline.recipe.load import HEADER_KEYS
from pipeline.recipe.render import render
from pipeline.registry import Registry


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@click.option(
    "--data",
    "count",
    type=click.IntRange(min=1),
    help="Show this many training samples instead, with the tokens that are trained on marked.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def show(
    registry: Registry | None,
    recipe: str,
    overrides: tuple[str, ...],
    origin: bool,
    count: int | None,
    as_json: bool,
) -> None:
    """Show RECIPE, or the recipe of the run folder RECIPE, as it would run.

    Files it extends, overrides, interpolations and defaults are filled in; what comes from the
    environment stays a reference. With --data, its samples are shown: data and tokenizer are
    prepared in this process, and no weights are read.
    """
    file = Path(recipe) / "recipe.yaml" if Path(recipe).is_dir() else Path(recipe)
    if count is not None:
        from pipeline.commands.show_data import show_data

        show_data(file, overrides, registry, count=count, as_json=as_json)
        return
    loaded, values = _resolved(file, overrides, registry or Registry.installed())
    if as_json:
        origins = {".".join(map(str, path)): loaded.origin(path) for path in _paths(values)}
        click.echo(
            json.dumps({"recipe": values, "origins": origins} if origin else values, indent=2)
        )
    else:
        click.echo(render(values, loaded.origin if origin else None), nl=False)


def _resolved(
    file: Path, overrides: tuple[str, ...], registry: Registry
) -> tuple[Recipe, dict[str, Any]]:
    recipe, problems = read_recipe(file, overrides)
    if recipe is None:
        raise RecipeError(in_order(problems))
    _, stages, more = load_slots(recipe, registry)
    problems += unless_reported(more, problems)
    if problems:
        raise RecipeError(in_order(problems))
    public = recipe.public()
    header = plain_value(Header(**{key: getattr(recipe, key) for key in HEADER_KEYS}))
    written = public.get("stages") or {}
    slots = {
        slot: {"use": written[slot]["use"], **_filled(plain_value(stage), written[slot])}
        for slot, stage in stages.items()
    }
    return recipe, {**_filled(header, public), "stages": slots}


def _filled(values: Any, written: Any) -> Any:
    """`values`, which hold every default, with what the recipe itself says in its own form."""
    if not isinstance(values, dict) or not isinstance(written, dict):
        return written
    return {
        key: _filled(value, written[key]) if key in written else value
        for key, value in values.items()
    }


def _paths(values: dict[str, Any], path: Keys = ()) -> Iterator[Keys]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, (*path, key))
        else:
            yield (*path, key)
