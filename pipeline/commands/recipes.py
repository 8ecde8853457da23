"""`pipe cp`, `pipe pin` and `pipe import`: write recipes."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from pipeline.commands import options
from pipeline.commands.options import PATH, Count, option
from pipeline.errors import Problem, RecipeError, UsageError, system_errors_as
from pipeline.utils.files import replace_bytes
from pipeline.utils.text import align, did_you_mean, plural, shown_path

if TYPE_CHECKING:
    from pipeline.importing.translator import Translation
    from pipeline.recipe import Recipe
    from pipeline.recipe.nodes import KeyPath
    from pipeline.utils.hub import HubName

VALUE = 44
"""Most characters of a value in the table of `pipe import`."""


@click.command("cp")
@click.argument("name", required=False, shell_complete=options.complete_shipped)
@click.argument("to", type=PATH, default=".")
def cp(name: str | None, to: Path) -> None:
    """Copy the shipped recipe NAME, with the recipes it extends, into the folder TO.

    TO is by default the current folder. Without NAME, list the shipped recipes.
    """
    from pipeline.recipe.includes import shipped
    from pipeline.recipe.nodes import texts_in

    if name is None:
        rows = list[tuple[str, str]]()
        for known, source in shipped().items():  # with the first sentence of its first comment
            text = source.read_text("utf-8").splitlines()
            comment = itertools.takewhile(lambda line: line.startswith("#"), text)
            words = " ".join(" ".join(line.removeprefix("#") for line in comment).split())
            rows.append((known, words.partition(". ")[0].partition("; ")[0]))
        click.echo("\n".join(align(rows, left=2)))
        return
    from pipeline.recipe import load_recipe

    recipes, wanted = shipped(), name.removesuffix(".yaml")
    if wanted not in recipes:
        raise UsageError(f"no recipe is called {name}", hint=did_you_mean(wanted, recipes))
    file = recipes[wanted]
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
    if own:
        names = ", ".join(str(to / text.removeprefix(inside)) for text in own)
        do, put = ("do", "files") if len(own) > 1 else ("does", "file")
        click.echo(
            f"{names} {do} not exist yet: put your {put} there, or name yours "
            "in the recipe, such as data.files",
            err=True,
        )
    check = f"pipe check {shlex.quote(str(to / file.name))}"
    click.echo(f"paths in it are relative to it; next: {check}", err=True)


@click.command("pin")
@click.argument("recipe", type=PATH, shell_complete=options.complete_recipes)
def pin(recipe: Path) -> None:
    """Write the commits of RECIPE's hub models and data sets into its file.

    Asks the hub for the commit of each branch or tag, and of each name without one, and writes it
    as `revision` next to the name. A name in a file that RECIPE extends is pinned in that file, for
    all recipes that extend it. Comments and layout stay. A second call changes nothing.
    """
    from pipeline.recipe import load_recipe
    from pipeline.recipe.dump import inline, with_value
    from pipeline.utils.hub import commit_of

    made = load_recipe(recipe)
    names = list(_hub_names(made))
    missing = [(slot, name) for slot, name in names if not name.pinned]
    if not missing:
        why = "all names have" if names else "no name of the hub needs"
        click.echo(f"nothing to pin: {why} a commit")
        return
    places = [_place(made, slot, name) for slot, name in missing]
    texts: dict[Path, str] = {}  # nothing is written unless all can be
    lines = []
    for (slot, name), (file, path, after) in zip(missing, places, strict=True):
        key, commit = f"{slot}.{name.key}", commit_of(name)
        if file not in texts:
            with system_errors_as(UsageError):
                texts[file] = file.read_bytes().decode("utf-8")
        text = with_value(texts[file], path, commit, after=after, note=name.asked[2])
        if text is None:
            hint = f"write {key}: {inline(commit)} yourself"
            raise UsageError(f"{file}: {key} cannot be written here", hint=hint)
        texts[file] = text
        lines.append(f"written: {key}: {commit} in {file}")
    with system_errors_as(UsageError):
        for file, text in texts.items():  # permissions and links to it stay
            real = file.resolve(strict=True)
            replace_bytes(real, text.encode(), mode=real.stat().st_mode)
    click.echo("\n".join(lines))
    left = [str(name) for _, name in _hub_names(load_recipe(recipe)) if not name.pinned]
    if left:
        raise UsageError(f"still without a commit: {', '.join(left)}")


def _hub_names(recipe: Recipe) -> Iterator[tuple[str, HubName]]:
    """Yield every slot's names of the hub. Raises RecipeError for slots with mistakes."""
    from pipeline.chain.plan import hub_names, in_order, load_slots

    _, stages, problems = load_slots(recipe, options.registry())
    if problems:
        raise RecipeError(in_order(problems))
    yield from hub_names(stages)


def _place(recipe: Recipe, slot: str, name: HubName) -> tuple[Path, KeyPath, str]:
    """Return the file and the path of a name's revision, and the field that has the name: where one
    is written for that name, or else next to the name. Raises RecipeError for a name that is not
    written there."""
    from pipeline.chain.plan import field_path

    path, named_by = field_path(slot, name.key), field_path(slot, name.named_by)
    for field in (named_by, path):
        if "${" in str(recipe.tree.written(field)):
            message = f"{name.repo} is not written here: it is {recipe.tree.written(field)}"
            key, place = ".".join(map(str, field[1:])), recipe.tree.place(field)
            hint = f"set {slot}.{name.key} yourself"
            raise RecipeError([Problem(message=message, key=key, hint=hint, location=place)])
    # A revision in a file that the name's file extends belongs to another name.
    written = [named_by, *([path] if recipe.tree.find(path) else [])]
    written_in = {Path(recipe.tree.place(one).file).absolute() for one in written}
    file = next(one for one in recipe.source_files if one in written_in)
    return Path(shown_path(file)), path, str(named_by[-1])


INCOMPLETE = 3
"""Exit code: the recipe is written, but lacks settings of the files, or some to be filled in."""


@click.command("import")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=PATH)
@options.out("Recipe to write.", default="standard output")
@option("--model", "Model to train: a folder, a GGUF file or a hub id (ID or ID@REVISION).")
@option("--data", "File or glob pattern to train on. May be repeated.", multiple=True)
@option("--procs", "Number of processes, if the files do not name it.", type=Count(min=1))
@options.as_json
def import_(
    files: tuple[Path, ...], out: Path | None, model: str | None, data: tuple[str, ...],
    procs: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Translate other tools' configuration files into a recipe.

    FILE is an accelerate config, a DeepSpeed JSON, transformers' TrainingArguments, or a recipe of
    axolotl, LLaMA-Factory or torchtune (YAML or JSON). Name files that belong together in one
    command. Standard error shows the outcome of every key. Exit code 3 if settings are missing from
    the recipe or `pipe check` refuses it, 2 if no recipe can be written.
    """
    from pipeline.importing import translator
    from pipeline.recipe.dump import render

    if out is not None and out.exists():
        raise UsageError(f"{out} exists already", hint="choose another file")
    read = [translator.read_config(file) for file in files]
    for file in read:
        if isinstance(file.content.get("stages"), dict):
            raise UsageError(f"{file.path} is a recipe already", hint=f"pipe check {file.path}")
    request = translator.Request(model=model, data=data, procs=procs)
    chosen = translator.choose(read, translator.installed_translators())
    translation = chosen.translate(read, request)
    recipe, notes = translation.recipe, translation.notes
    text = None if recipe is None else render({**recipe}, lambda path: notes.get(path, ""))
    found = [] if text is None else _problems(text, translation)
    if not as_json:
        checked = (f"pipe check: {problem}" for problem in found)
        for line in (*outcome_table(translation), *checked):
            click.echo(line, err=True)
    if text is not None and out is not None:
        out.write_text(text, "utf-8")
    if as_json:
        click.echo(json.dumps({**outcome_json(translation), "problems": found}, indent=1))
    elif text is not None and out is None:
        click.echo(text, nl=False)
    if text is None:
        sys.exit(2)
    lacks = translation.missing or any(each.left_out for each in translation.outcomes)
    sys.exit(INCOMPLETE if lacks or found else 0)


def outcome_table(translation: Translation) -> Iterator[str]:
    """Yield a line for each key, for each missing recipe key, and a count of the outcomes."""
    from pipeline.importing.translator import Outcome
    from pipeline.recipe.dump import inline

    outcomes, rows = translation.outcomes, []
    for each in outcomes:
        value = "{...}" if isinstance(each.value, Mapping) else inline(each.value)
        short = value if len(value) <= VALUE else f"{value[: VALUE - 3]}..."
        to = ", ".join(f"{key} = {json.dumps(new)}" for key, new in each.to.items())
        why = "; ".join(part for part in (to, each.why) if part)
        hint = f" ({each.hint})" if each.hint else ""
        rows.append((f"  {each.key}: {short}", each.outcome, f"{why}{hint}".lstrip()))
    lines = zip(outcomes, align(rows, left=3), strict=True)
    for file, keys in groupby(lines, key=lambda pair: pair[0].file):
        yield f"{file}:"
        yield from (line for _, line in keys)
    yield from (f"fill in {key}: {what}" for key, what in translation.missing.items())
    counts = Counter(each.outcome for each in outcomes)
    named = (f"{counts[one]} {'by ' * (one == 'default')}{one}" for one in get_args(Outcome))
    yield f"{plural(len(outcomes), 'key')}: {', '.join(named)}"


def outcome_json(translation: Translation) -> dict[str, Any]:
    """Return the content of the table, and the recipe."""
    from pipeline.importing.translator import KeyOutcome

    names = [field.name for field in fields(KeyOutcome)]  # a translator's outcomes have more
    keys = [{name: getattr(each, name) for name in names} for each in translation.outcomes]
    return {"recipe": translation.recipe, "missing": {**translation.missing}, "keys": keys}


def _problems(text: str, translation: Translation) -> list[str]:
    """What `pipe check` refuses, without lacks of this machine and keys to be filled in."""
    from pipeline.chain.plan import plan_file

    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            plan_file(file.name, forecast=True)
        except RecipeError as error:
            found = [replace(problem, location=None) for problem in error.problems]
            return [str(each) for each in found if each.key not in translation.missing]
    return []
