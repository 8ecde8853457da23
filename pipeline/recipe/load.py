"""Load a `Recipe` from files and overrides, or find every mistake in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from pipeline.distributed.settings import Launch
from pipeline.errors import Location, Problem, RecipeError
from pipeline.recipe.dump import render
from pipeline.recipe.fields import build
from pipeline.recipe.includes import Sources
from pipeline.recipe.interpolation import resolve
from pipeline.recipe.merge import Common, apply, lost, put, without_former
from pipeline.recipe.nodes import (
    RESERVED,
    KeyPath,
    MissingKey,
    Node,
    NoSlot,
    UnknownKey,
    plain,
)
from pipeline.utils.text import closest, did_you_mean

SLOT = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """Top-level settings of a recipe, without its stages."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    """Name of the run: letters, digits, dot, dash, underscore."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of all randomness."""
    launch: Launch = Launch()
    """Processes and devices of the run."""
    env: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()
    """Environment variables that `${oc.env:NAME}` may read."""
    dry_run: bool = False
    """Whether to save, consolidate and export the untrained model once before training, on its real
    shapes, verify that export, and remove all of it: what would fail at the end fails at the
    start."""


HEADER_KEYS = tuple(RecipeSettings.__dataclass_fields__)
TOP_LEVEL = (*HEADER_KEYS, "extends", "stages")


@dataclass(frozen=True, kw_only=True)
class SlotSpec:
    """One slot as written: the stage's name and its fields, interpolations resolved."""

    use: str
    """Empty when the recipe does not say (that is a problem already reported)."""
    fields: Mapping[str, Any]
    takes: Mapping[str, str | None] = field(default_factory=dict)
    """Parameter of the stage's `run` -> the slot whose artifact it gets; None leaves it out."""


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeSettings):
    """A merged recipe. Fields of stages are not validated yet; `make_plan` does that."""

    stages: Mapping[str, SlotSpec]
    source_files: tuple[Path, ...] = field(compare=False)
    """The recipe's own file first; each before the files that it overrides."""
    tree: Node = field(compare=False, repr=False)
    replaced: tuple[Problem, ...] = field(default=(), compare=False, repr=False)
    """Warnings of fields that stayed or were lost with another `use`, and of earlier versions."""

    @property
    def uses(self) -> dict[str, str]:
        """Slot -> the name of its stage, in order."""
        return {slot: spec.use for slot, spec in self.stages.items()}

    def origin(self, path: KeyPath) -> str:
        """`file:line:column` or the override that set the value at `path`; `default` if nothing."""
        node = self.tree.find(path)
        return str(node.at) if node is not None else "default"

    def dump(self) -> str:
        """The merged recipe as YAML: self-contained, without any environment variable's value."""
        return render(plain(self.tree))

    def public(self) -> dict[str, Any]:
        """The merged values, interpolations resolved but for what depends on the environment."""
        resolved, _ = resolve(self.tree, hide_env=True)
        return {key: _public(value, resolved[key]) for key, value in plain(self.tree).items()}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge and resolve. Raises RecipeError with all problems found."""
    recipe, problems = read_recipe(path, overrides)
    if recipe is None or problems:
        raise RecipeError(problems)
    return recipe


def read_recipe(
    path: str | Path, overrides: Sequence[str] = (), common: Common = lambda first, second: ()
) -> tuple[Recipe | None, list[Problem]]:
    """Read, merge and resolve as far as possible; return the recipe and all problems.

    `common` returns the fields that stay where an override names another `use` for a slot. The
    recipe is None when a file cannot be read at all. Parts with problems hold defaults."""
    sources = Sources(TOP_LEVEL)
    tree = sources.read(Path(path))
    if tree is None:
        return None, sources.problems
    from_files = list(lost(tree, common))
    tree, wrong_overrides, stayed = apply(tree, overrides, HEADER_KEYS, common)
    filled = {slot: node for slot, node in tree.slots().items() if node.value is not None}
    tree, former = without_former(tree.with_slots(filled))
    # so that interpolations do not find the values of other keys
    entries = {key: node for key, node in tree.entries().items() if key in TOP_LEVEL}
    unknown: list[Problem] = []
    for key in (key for key in tree.entries() if key not in entries):
        value, near = plain(tree.entries()[key]), closest(key, TOP_LEVEL) or ""
        is_slot = isinstance(value, dict) and "use" in value
        hint = "slots belong under `stages`" if is_slot else did_you_mean(key, TOP_LEVEL)
        more = {"path": (key,), "value": value, "closest": near, "kind": UnknownKey}
        unknown.append(tree.problem((key,), "unknown key", hint, at_key=True, **more))
    recipe, unresolved, wrong = _recipe(replace(tree, value=entries))
    recipe = replace(
        recipe, source_files=tuple(sources.files), replaced=(*from_files, *stayed, *former)
    )
    known = [*sources.problems, *wrong_overrides, *unknown, *unresolved]
    return recipe, known + unless_reported(wrong, known)


def recipe_of(tree: Node) -> Recipe:
    """The recipe of a merged tree. Raises RecipeError."""
    recipe, unresolved, wrong = _recipe(tree)
    if unresolved or wrong:
        raise RecipeError(unresolved + unless_reported(wrong, unresolved))
    return recipe


def with_values(recipe: Recipe, values: Mapping[KeyPath, tuple[Any, Location]]) -> Recipe:
    """The recipe with a value, and its origin, at each path of a field. Raises RecipeError where an
    interpolation stands above the path."""
    tree = recipe.tree
    for path, (value, origin) in values.items():
        tree = put(tree, path, Node(value=value, at=origin))
    changed, unresolved, _ = _recipe(tree)
    if unresolved:
        raise RecipeError(unresolved)
    return replace(recipe, stages=changed.stages, tree=tree)


def _recipe(tree: Node) -> tuple[Recipe, list[Problem], list[Problem]]:
    """The recipe of a merged tree, its wrong interpolations, and its other problems."""
    data, unresolved = resolve(tree)
    given = {key: data[key] for key in HEADER_KEYS if key in data}
    header, wrong = build(RecipeSettings, given, tree=tree, path=())
    settings = vars(header or RecipeSettings(name="unnamed"))
    stages, wrong_slots = _slots(data.get("stages"), tree)
    recipe = Recipe(**settings, stages=stages, tree=tree, source_files=())
    return recipe, unresolved, wrong + wrong_slots


def _slots(stages: Any, tree: Node) -> tuple[dict[str, SlotSpec], list[Problem]]:
    if stages is None:
        return {}, []
    if not isinstance(stages, Mapping) or isinstance(stages.get("use"), str):
        message = "must be a mapping of slots, each with `use` and the stage's fields"
        hint = "write a slot's name before each, without dashes: `model: {use: ..., ...}`"
        place = tree.place(("stages",))
        if isinstance(stages, Mapping):
            message = "`use` stands where a slot's name belongs"
            hint = "indent it, and the fields after it, by two spaces more than the slot's name"
            place = tree.key_place(("stages", "use"))
        return {}, [Problem(message=message, key="stages", hint=hint, location=place)]
    slots: dict[str, SlotSpec] = {}
    problems: list[Problem] = []
    for slot, value in stages.items():
        problems += _wrong_slot(slot, value, tree)
        fields = dict(value) if isinstance(value, Mapping) else {}
        use, takes = fields.pop("use", None), fields.pop("takes", None)
        use = use if isinstance(use, str) else ""
        slots[slot] = SlotSpec(use=use, fields=fields, takes=takes if _is_wires(takes) else {})
    return slots, problems


def _wrong_slot(slot: str, value: Any, tree: Node) -> Iterator[Problem]:
    path: KeyPath = ("stages", slot)
    if slot in TOP_LEVEL:
        message = f"a slot cannot be called `{slot}`: that is a key of the recipe itself"
        yield tree.problem(path, message, at_key=True)
    elif not SLOT.fullmatch(slot):
        message = "a slot's name is small letters, digits and underscores, and starts with a letter"
        yield tree.problem(path, message, at_key=True)
    if not isinstance(value, Mapping):
        command_line = tree.place(path).on_command_line
        field, equals, rest = str(value).partition("=")
        hint = f"write `{slot}: {{use: ...}}`; `pipe stages` lists the stages"
        if isinstance(value, list):
            hint = "remove the dashes: a slot's fields are not a list"
        elif command_line and equals:
            hint = f"write {slot}.{field}={rest}"
        elif isinstance(value, str) and re.fullmatch(r"[a-z][\w.]*", value):
            stage = value if "." in value else f"{slot}.{value}"
            hint = f"write `{slot}: {{use: {stage}}}`"
            hint = f"write {slot}.use={stage}" if command_line else hint
        message = "a slot is a mapping with `use` and the stage's fields"
        yield tree.problem(path, message, hint, kind=NoSlot, name=slot)
        return
    if not _is_wires(value.get("takes") or {}):
        hint = "such as `takes: {engine: wrap}`; `pipe dag` shows what each slot reads"
        yield tree.problem((*path, "takes"), "must name a slot for each artifact", hint)
    use, path, hint = value.get("use"), (*path, "use"), "`pipe stages` lists them"
    if "use" not in value:
        yield tree.problem(path, "is missing", hint, kind=MissingKey, at_key=True)
    elif not isinstance(use, str) or not use:
        yield tree.problem(path, "must be a stage's name", hint)


def _is_wires(takes: Any) -> bool:
    """Whether a value maps parameters to slots."""
    return isinstance(takes, Mapping) and all(isinstance(one, str | None) for one in takes.values())


def reserved(slot: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a slot that are not fields of its stage."""
    return {key: slot[key] for key in RESERVED if slot.get(key)}


def unless_reported(problems: list[Problem], reported: list[Problem]) -> list[Problem]:
    """`problems` without those about a value that is already known to be wrong."""
    known = {(problem.location, problem.key) for problem in reported}
    # a problem of the text itself does not know its key, only its place
    return [p for p in problems if known.isdisjoint({(p.location, p.key), (p.location, "")})]


def _public(written: Any, resolved: Any) -> Any:
    if isinstance(written, dict):
        return {key: _public(value, resolved[key]) for key, value in written.items()}
    if isinstance(written, list):
        return [_public(value, resolved[index]) for index, value in enumerate(written)]
    return written if "${" in json.dumps(resolved) else resolved
