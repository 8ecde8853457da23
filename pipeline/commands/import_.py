"""`pipe import`."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import Count, json_option, out_option
from pipeline.errors import RecipeError, UsageError

if TYPE_CHECKING:
    from pipeline.importing.translator import Translation

INCOMPLETE = 3
"""Exit code: the recipe is written, but lacks settings of the files, or some to be filled in."""


@click.command("import")
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@out_option("Recipe to write.", default="standard output")
@click.option(
    "--model", help="Model to train: a folder, a GGUF file or a hub id (ID or ID@REVISION)."
)
@click.option("--data", multiple=True, help="File or glob pattern to train on. May be repeated.")
@click.option(
    "--procs", type=Count(min=1), help="Number of processes, if the files do not name it."
)
@json_option
def import_(
    files: tuple[Path, ...],
    out: Path | None,
    model: str | None,
    data: tuple[str, ...],
    procs: int | None,
    as_json: bool,
) -> None:
    """Translate other tools' configuration files into a recipe.

    FILE is an accelerate config, a DeepSpeed JSON, transformers' TrainingArguments, or a recipe of
    axolotl, LLaMA-Factory or torchtune (YAML or JSON). Name files that belong together in one
    command. Standard error shows the outcome of every key. Exit code 3 if settings are missing from
    the recipe or `pipe check` refuses it, 2 if no recipe can be written.
    """
    from pipeline.importing import translator
    from pipeline.importing.translator import Request, choose, installed_translators, read_config

    if out is not None and out.exists():
        raise UsageError(f"{out} exists already", hint="choose another file")
    read = [read_config(file) for file in files]
    for file in read:
        if isinstance(file.content.get("stages"), dict):
            raise UsageError(f"{file.path} is a recipe already", hint=f"pipe check {file.path}")
    request = Request(model=model, data=data, procs=procs)
    translation = choose(read, installed_translators()).translate(read, request)
    found = _problems(translation)
    if not as_json:
        for line in (
            *translator.table(translation),
            *(f"pipe check: {problem}" for problem in found),
        ):
            click.echo(line, err=True)
    if translation.recipe is not None and out is not None:
        out.write_text(translator.recipe_text(translation), "utf-8")
    if as_json:
        click.echo(json.dumps({**translator.as_json(translation), "problems": found}, indent=1))
    elif translation.recipe is not None and out is None:
        click.echo(translator.recipe_text(translation), nl=False)
    if translation.recipe is None:
        sys.exit(2)
    lacks = translation.missing or any(each.left_out for each in translation.outcomes)
    sys.exit(INCOMPLETE if lacks or found else 0)


def _problems(translation: Translation) -> list[str]:
    """Return what `pipe check` refuses about the recipe, but for what this machine lacks, and what
    is filled in."""
    from pipeline.chain.plan import plan_file
    from pipeline.importing import translator

    if translation.recipe is None:
        return []
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(translator.recipe_text(translation))
        file.flush()
        try:
            plan_file(file.name, forecast=True)
        except RecipeError as error:
            found = [replace(problem, location=None) for problem in error.problems]
            return [str(each) for each in found if each.key not in translation.missing]
    return []
