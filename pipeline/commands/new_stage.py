"""`pipe new-stage`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click


@click.command("new-stage")
@click.argument("name")
@click.option("--to", type=click.Path(path_type=Path), help="The folder to make.")
def new_stage(name: str, to: Path | None) -> None:
    """Write a plugin package with the stage NAME, such as optimizer.sgd.

    The package works as it is, its test too: for an `optimizer`, for a `track` (a tracker), and for
    any other kind a stage that runs behind an export. Change it to what you need.
    """
    from pipeline.errors import UsageError, system_errors_as
    from pipeline.scaffold.package import write_package

    with system_errors_as(UsageError):
        written = write_package(name, to)
    for path in written:
        click.echo(path)
    package = shlex.quote(f"{written[0].parent}[dev]")
    click.echo(f"next: pip install -e {package} && pipe stages {name}", err=True)
