"""`pipe schema`."""

from __future__ import annotations

import json

import click

from pipeline.registry import Registry
from pipeline.schema import recipe_schema


@click.command()
@click.pass_obj
def schema(registry: Registry | None) -> None:
    """Print the JSON Schema of recipes, composed from the installed stages.

    Save it as recipe.schema.json and start a recipe with the line

    # yaml-language-server: $schema=recipe.schema.json
    """
    click.echo(json.dumps(recipe_schema(registry or Registry.installed()), indent=2))
