"""`pipe stages`."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator
from typing import Any

import click

from pipeline.chain.entry_points import Entry
from pipeline.chain.json_schema import recipe_schema
from pipeline.chain.registry import Registry
from pipeline.commands.completion import STAGE
from pipeline.commands.options import json_option
from pipeline.contracts.signature import gives, needs
from pipeline.errors import PluginError, UsageError
from pipeline.recipe.fields import FieldRow, field_rows
from pipeline.utils.text import align


@click.command()
@click.argument("name", required=False, shell_complete=STAGE)
@json_option
@click.pass_obj
def stages(registry: Registry | None, name: str | None, as_json: bool) -> None:
    """List the installed stages, or explain stage NAME with all its fields."""
    registry = registry or Registry.installed()
    if name is None:
        listed = [_listed(entry, registry) for entry in registry.entries()]
        click.echo(json.dumps(listed, indent=2) if as_json else "\n".join(_columns(listed)))
        return
    if name not in registry:
        raise UsageError(f"there is no stage `{name}`", hint=registry.hint(name))
    explained = _explained(name, registry)
    click.echo(json.dumps(explained, indent=2) if as_json else "\n".join(_page(explained)))


def _listed(entry: Entry, registry: Registry) -> dict[str, str]:
    try:
        summary, broken = inspect.cleandoc(registry.load(entry.name).__doc__ or ""), ""
    except PluginError as error:
        summary, broken = "", str(error)
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "summary": " ".join(summary.split("\n\n")[0].split()),
        "error": broken,
    }


def _columns(listed: list[dict[str, str]]) -> Iterator[str]:
    if not listed:
        yield "no stages are installed"
    rows = []
    for each in listed:
        text = f"cannot be used: {each['error']}" if each["error"] else each["summary"]
        rows.append((each["name"], f"{each['distribution']} {each['version']}", text))
    yield from align(rows, left=3)


def _explained(name: str, registry: Registry) -> dict[str, Any]:
    kind, entry = registry.load(name), registry.entry(name)
    given = gives(kind)
    return {
        "name": name,
        "distribution": entry.distribution,
        "version": entry.version,
        "doc": inspect.cleandoc(kind.__doc__ or ""),
        "needs": [
            {"parameter": need.parameter, "type": need.type.__name__, "optional": need.optional}
            for need in needs(kind)
        ],
        "returns": given.__name__ if given else None,
        "fields": [dataclasses.asdict(row) for row in field_rows(kind)],
    }


def _page(explained: dict[str, Any]) -> Iterator[str]:
    yield f"{explained['name']} ({explained['distribution']} {explained['version']})"
    yield ""
    yield explained["doc"]
    yield ""
    wanted = [
        f"{need['parameter']} ({need['type']}{', optional' if need['optional'] else ''})"
        for need in explained["needs"]
    ]
    yield f"needs: {', '.join(wanted) or 'nothing'}"
    yield f"returns: {explained['returns'] or 'nothing'}"
    yield ""
    yield "fields:" if explained["fields"] else "no fields"
    indent = " " * 6
    for row in (FieldRow(**fields) for fields in explained["fields"]):
        default = "required" if row.default is None else f"default {row.default}"
        bounds = f", {row.range}" if row.range else ""
        yield f"  {row.name}: {row.type} ({default}{bounds})"
        if row.doc:
            yield click.wrap_text(row.doc, 96, initial_indent=indent, subsequent_indent=indent)


@click.command()
@click.pass_obj
def schema(registry: Registry | None) -> None:
    """Print the JSON Schema of recipes with the installed stages.

    Save it as recipe.schema.json and begin a recipe with the line

    # yaml-language-server: $schema=recipe.schema.json
    """
    click.echo(json.dumps(recipe_schema(registry or Registry.installed()), indent=2))
