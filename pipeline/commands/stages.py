"""`pipe stages`, `pipe schema` and `pipe new-stage`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pipeline.chain.json_schema import recipe_schema
from pipeline.commands import options
from pipeline.commands.options import FOLDER
from pipeline.contracts.signature import gives, needs
from pipeline.errors import PluginError, UsageError, system_errors_as
from pipeline.recipe.fields import FieldRow, field_rows
from pipeline.utils.text import align


@click.command()
@click.argument("name", required=False, shell_complete=options.complete_stages)
@options.as_json
def stages(name: str | None, as_json: bool) -> None:
    """List the installed stages, or explain stage NAME with all its fields."""
    registry = options.registry()
    if name is not None:
        if name not in registry:
            raise UsageError(f"there is no stage `{name}`", hint=registry.hint(name))
        kind, entry = registry.load(name), registry.entry(name)
        given = gives(kind)
        explained = {
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
        click.echo(json.dumps(explained, indent=2) if as_json else "\n".join(_page(explained)))
        return
    listed, rows = [], []
    for entry in registry.entries():
        try:
            doc, broken = inspect.cleandoc(registry.load(entry.name).__doc__ or ""), ""
        except PluginError as error:
            doc, broken = "", str(error)
        summary = " ".join(doc.split("\n\n")[0].split())
        package = {"distribution": entry.distribution, "version": entry.version}
        listed.append({"name": entry.name, **package, "summary": summary, "error": broken})
        text = f"cannot be used: {broken}" if broken else summary
        rows.append((entry.name, f"{entry.distribution} {entry.version}", text))
    lines = align(rows, left=3) if rows else ["no stages are installed"]
    click.echo(json.dumps(listed, indent=2) if as_json else "\n".join(lines))


def _page(explained: dict[str, Any]) -> Iterator[str]:
    yield f"{explained['name']} ({explained['distribution']} {explained['version']})\n"
    yield f"{explained['doc']}\n"
    wanted = [
        f"{need['parameter']} ({need['type']}{', optional' if need['optional'] else ''})"
        for need in explained["needs"]
    ]
    yield f"needs: {', '.join(wanted) or 'nothing'}"
    yield f"returns: {explained['returns'] or 'nothing'}\n"
    yield "fields:" if explained["fields"] else "no fields"
    indent = " " * 6
    for row in (FieldRow(**fields) for fields in explained["fields"]):
        default = "required" if row.default is None else f"default {row.default}"
        bounds = f", {row.range}" if row.range else ""
        yield f"  {row.name}: {row.type} ({default}{bounds})"
        if row.doc:
            yield click.wrap_text(row.doc, 96, initial_indent=indent, subsequent_indent=indent)


@click.command()
def schema() -> None:
    """Print the JSON Schema of recipes with the installed stages.

    Save it as recipe.schema.json and begin a recipe with the line

    # yaml-language-server: $schema=recipe.schema.json
    """
    click.echo(json.dumps(recipe_schema(options.registry()), indent=2))


@click.command("new-stage")
@click.argument("name")
@options.out("Folder to make.", kind=FOLDER)
def new_stage(name: str, out: Path | None) -> None:
    """Write a plugin package with the stage NAME, such as optimizer.sgd.

    The package works as it is, its test too. Kinds with an example: adapter, callback, checkpoint,
    consolidate, data, export, model, optimizer, track (a tracker), wrap (a strategy). Any other
    kind is a stage that runs after an export, except average, precision and train, which have no
    example. Change it to what you need.
    """
    from pipeline.scaffold import new_stage, write_package

    with system_errors_as(UsageError):
        new = new_stage(name)
        written = write_package(new, out)
    for path in written:
        click.echo(path)
    if new.template != new.kind:
        text = f"there is no example of the kind `{new.kind}`: this stage runs after an export"
        click.echo(text, err=True)
    folder = str(written[0].parent)
    install = f"pip install -e {shlex.quote(f'{folder}[dev]')}"
    click.echo(f"next: {install} && pytest {shlex.quote(folder)}", err=True)
