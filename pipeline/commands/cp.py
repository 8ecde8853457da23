"""`pipe cp`."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import click

from pipeline.commands.completion import SHIPPED
from pipeline.errors import UsageError, system_errors_as
from pipeline.utils.text import align


@click.command("cp")
@click.argument("name", required=False, shell_complete=SHIPPED)
@click.argument("to", type=click.Path(path_type=Path), default=".")
def cp(name: str | None, to: Path) -> None:
    """Copy the shipped recipe NAME, with the recipes it extends, into the folder TO.

    TO is by default the current folder. Without NAME, list the shipped recipes.
    """
    from pipeline.recipe.includes import shipped, shipped_recipe
    from pipeline.recipe.nodes import texts_in

    if name is None:
        rows = [(known, _summary(file)) for known, file in shipped().items()]
        click.echo("\n".join(align(rows, left=2)))
        return
    from pipeline.recipe import load_recipe

    file = shipped_recipe(name)
    with system_errors_as(UsageError):
        to.mkdir(parents=True, exist_ok=True)
        for source in load_recipe(file).source_files:
            target = to / source.name
            if target.exists() and target.read_bytes() != source.read_bytes():
                raise UsageError(f"{target} already exists and differs")
            shutil.copyfile(source, target)
            click.echo(target)
    inside = f"{to.resolve()}/"
    named = dict.fromkeys(texts_in(load_recipe(to / file.name).public()))
    own = [text for text in named if text.startswith(inside) and not Path(text).exists()]
    absent = [to / text.removeprefix(inside) for text in own]
    if absent:
        names = ", ".join(map(str, absent))
        do, put = ("do", "files") if len(absent) > 1 else ("does", "file")
        click.echo(
            f"{names} {do} not exist yet: put your {put} there, or name yours "
            "in the recipe, such as data.files",
            err=True,
        )
    check = f"pipe check {shlex.quote(str(to / file.name))}"
    click.echo(f"paths in it are relative to it; next: {check}", err=True)


def _summary(file: Path) -> str:
    """Return the first sentence of the comment that a recipe begins with."""
    lines = []
    for line in file.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(" ".join(lines).split()).partition(". ")[0].partition("; ")[0]
