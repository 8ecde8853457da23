"""`pipe import`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pipeline.importing.translator import Translation

INCOMPLETE = 3
"""Exit code: the recipe is written, but lacks some settings of the files."""


@click.command("import")
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The recipe to write.")
@click.option("--model", help="Model to train: a folder, a GGUF file or a hub id (ID@COMMIT).")
@click.option("--data", multiple=True, help="File or glob pattern to train on. May be repeated.")
@click.option("--procs", type=click.IntRange(min=1), help="Processes, if the files do not say.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def import_(
    files: tuple[Path, ...],
    output: Path | None,
    model: str | None,
    data: tuple[str, ...],
    procs: int | None,
    as_json: bool,
) -> None:
    """Turn other tools' configuration into a recipe.

    FILEs are an accelerate config, a DeepSpeed JSON, transformers' TrainingArguments, a recipe of
    axolotl, LLaMA-Factory or torchtune (YAML or JSON), or several that belong together. stderr
    shows the outcome of every key. Exit code 3 if the recipe lacks a setting, 2 if no recipe is
    written.
    """
    from pipeline.errors import UsageError
    from pipeline.importing import table
    from pipeline.importing.files import read_config
    from pipeline.importing.translator import Request, choose, installed_translators

    if output is not None and output.exists():
        raise UsageError(f"{output} exists already", hint="choose another file")
    read = [read_config(file) for file in files]
    request = Request(model=model, data=data, procs=procs)
    translation = choose(read, installed_translators()).translate(read, request)
    if not as_json:
        for line in table.table(translation):
            click.echo(line, err=True)
    if translation.recipe is not None and output is not None:
        output.write_text(table.recipe_text(translation), "utf-8")
    if as_json:
        click.echo(json.dumps(table.as_json(translation), indent=1))
    elif translation.recipe is not None and output is None:
        click.echo(table.recipe_text(translation), nl=False)
    sys.exit(_exit_code(translation))


def _exit_code(translation: Translation) -> int:
    if translation.recipe is None:
        return 2
    return INCOMPLETE if any(each.left_out for each in translation.outcomes) else 0
