"""`pipe pin`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.completion import RECIPE

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
    from pipeline.errors import UsageError
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
    commits = [commit_of(edit.name) for edit in edits]  # nothing is written unless all are found
    for edit, commit in zip(edits, commits, strict=True):
        edit.write(commit)
        click.echo(f"written: {edit.key}: {commit} in {edit.file}")
    left = [str(name) for _, name in _names(load_recipe(recipe), known) if not name.pinned]
    if left:
        raise UsageError(f"still without a commit: {', '.join(left)}")


def _names(recipe: Recipe, registry: Registry) -> Iterator[tuple[str, HubName]]:
    """Yield every slot's names of the hub. Raises RecipeError for slots with mistakes."""
    from pipeline.chain.names import hub_names
    from pipeline.chain.plan import in_order, load_slots
    from pipeline.errors import RecipeError

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

    def write(self, commit: str) -> None:
        """Write it into the file. Raises UsageError."""
        from pipeline.errors import UsageError, system_errors_as
        from pipeline.recipe.written import with_value
        from pipeline.utils.files import overwrite

        with system_errors_as(UsageError):
            text = self.file.read_bytes().decode("utf-8")
            note = self.name.asked[2]
            overwrite(self.file, with_value(text, self.path, commit, after=self.after, note=note))


def _edit(recipe: Recipe, slot: str, name: HubName) -> _Edit:
    """Find the file and the place of a name's revision: where one is written, or else next to the
    name. Raises RecipeError for a name that is not written there."""
    from pipeline.chain.names import field_path
    from pipeline.errors import Problem, RecipeError
    from pipeline.recipe.nodes import lookup

    places = recipe.places
    path, named_by = field_path(slot, name.key), field_path(slot, name.named_by)
    for written in (named_by, path):
        if "${" in str(lookup(places.data, written)):
            message = f"{name.repo} is not written here: it is {lookup(places.data, written)}"
            key, place = ".".join(map(str, written[1:])), places.value(written)
            hint = f"set {slot}.{name.key} yourself"
            raise RecipeError([Problem(message=message, key=key, hint=hint, location=place)])
    place = places.value(path if path in places.values else named_by)
    after = str(named_by[-1])
    key = f"{slot}.{name.key}"
    return _Edit(name=name, key=key, path=path, after=after, file=Path(place.file))
