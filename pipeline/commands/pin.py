"""`pipe pin`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.completion import RECIPE
from pipeline.errors import Problem, RecipeError, UsageError, system_errors_as
from pipeline.utils.files import overwrite
from pipeline.utils.text import shown_path

if TYPE_CHECKING:
    from pipeline.chain.registry import Registry
    from pipeline.recipe import Recipe
    from pipeline.recipe.nodes import KeyPath
    from pipeline.utils.hub import HubName


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path), shell_complete=RECIPE)
@click.pass_obj
def pin(registry: Registry | None, recipe: Path) -> None:
    """Write the commits of RECIPE's hub models and data sets into its file.

    Asks the hub for the commit of each branch or tag, and of each name without one, and writes it
    as `revision` next to the name. A name in a file that RECIPE extends is pinned in that file, for
    all recipes that extend it. Comments and layout stay. A second call changes nothing.
    """
    from pipeline.chain.registry import Registry
    from pipeline.recipe import load_recipe
    from pipeline.utils.hub import commit_of

    known = registry or Registry.installed()
    made = load_recipe(recipe)
    names = list(_names(made, known))
    edits = [_edit(made, slot, name) for slot, name in names if not name.pinned]
    if not edits:
        click.echo(f"nothing to pin: {'all names have' if names else 'no name of the hub needs'} "
                   "a commit")  # fmt: skip
        return
    commits = [commit_of(edit.name) for edit in edits]
    texts: dict[Path, str] = {}  # nothing is written unless all can be
    for edit, commit in zip(edits, commits, strict=True):
        texts[edit.file] = edit.made(texts.get(edit.file), commit)
    with system_errors_as(UsageError):
        for file, text in texts.items():
            overwrite(file, text)
    for edit, commit in zip(edits, commits, strict=True):
        click.echo(f"written: {edit.key}: {commit} in {edit.file}")
    left = [str(name) for _, name in _names(load_recipe(recipe), known) if not name.pinned]
    if left:
        raise UsageError(f"still without a commit: {', '.join(left)}")


def _names(recipe: Recipe, registry: Registry) -> Iterator[tuple[str, HubName]]:
    """Yield every slot's names of the hub. Raises RecipeError for slots with mistakes."""
    from pipeline.chain.names import hub_names
    from pipeline.chain.plan import in_order, load_slots

    _, stages, problems = load_slots(recipe, registry)
    if problems:
        raise RecipeError(in_order(problems))
    yield from hub_names(stages)


@dataclass(frozen=True, kw_only=True)
class _Edit:
    """A commit to write."""

    name: HubName
    key: str
    """As people write it, `model.revision`."""
    path: KeyPath
    after: str
    """Field of the same mapping that has the name."""
    file: Path

    def made(self, text: str | None, commit: str) -> str:
        """Return the file's text, or a changed one, with the commit. Raises UsageError."""
        from pipeline.recipe.dump import inline, with_value

        if text is None:
            with system_errors_as(UsageError):
                text = self.file.read_bytes().decode("utf-8")
        note = self.name.asked[2]
        made = with_value(text, self.path, commit, after=self.after, note=note)
        if made is None:
            message = f"{self.file}: {self.key} cannot be written here"
            raise UsageError(message, hint=f"write {self.key}: {inline(commit)} yourself")
        return made


def _edit(recipe: Recipe, slot: str, name: HubName) -> _Edit:
    """Find the file and the place of a name's revision: where one is written for that name, or else
    next to the name. Raises RecipeError for a name that is not written there."""
    from pipeline.chain.names import field_path

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
    after = str(named_by[-1])
    key = f"{slot}.{name.key}"
    return _Edit(name=name, key=key, path=path, after=after, file=Path(shown_path(file)))
