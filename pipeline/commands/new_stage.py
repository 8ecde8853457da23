"""`pipe new-stage`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from pipeline.commands.options import FOLDER, out_option
from pipeline.errors import UsageError, system_errors_as


@click.command("new-stage")
@click.argument("name")
@out_option("Folder to make.", kind=FOLDER)
def new_stage(name: str, out: Path | None) -> None:
    """Write a plugin package with the stage NAME, such as optimizer.sgd.

    The package works as it is, its test too. Kinds with an example: adapter, callback, checkpoint,
    consolidate, data, export, model, optimizer, track (a tracker), wrap (a strategy). Any other
    kind is a stage that runs after an export, except average, precision and train, which have no
    example. Change it to what you need.
    """
    from pipeline.scaffold.package import NewStage, write_package

    with system_errors_as(UsageError):
        new = NewStage(name)
        written = write_package(new, out)
    for path in written:
        click.echo(path)
    if new.template != new.kind:
        click.echo(
            f"there is no example of the kind `{new.kind}`: this stage runs after an export",
            err=True,
        )
    folder = str(written[0].parent)
    install = f"pip install -e {shlex.quote(f'{folder}[dev]')}"
    click.echo(f"next: {install} && pytest {shlex.quote(folder)}", err=True)
