"""Completion in shells: `pipe completion`, and what arguments can be completed to.

Shells call `pipe` itself for this (click's mechanism), so all of it has to be fast and silent.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import click
from click.shell_completion import CompletionItem, get_completion_class

if TYPE_CHECKING:
    from pipeline.chain.registry import Registry

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
MOST_RUNS = 50
SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the lines that make SHELL complete `pipe`.

    For bash: eval "$(pipe completion bash)" in ~/.bashrc. Completed are commands, options, recipes,
    runs, stages, and the keys and values of overrides.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    from pipeline.cli import main

    click.echo(kind(main, {}, "pipe", "_PIPE_COMPLETE").source())


def _quietly(found: Callable[[click.Context, str], Iterator[str]]) -> Complete:
    """Return a function of click's that offers what `found` yields and begins as typed; nothing if
    it fails."""

    def complete(
        context: click.Context, parameter: click.Parameter, typed: str
    ) -> list[CompletionItem]:
        with contextlib.suppress(Exception):
            return [CompletionItem(one) for one in found(context, typed) if one.startswith(typed)]
        return []

    return complete


def _runs(context: click.Context, typed: str) -> Iterator[str]:
    root = Path(typed).parent if "/" in typed else Path("runs")
    found = sorted(root.glob("*/recipe.yaml"), key=lambda file: -file.stat().st_mtime)
    yield from (str(file.parent) for file in found[:MOST_RUNS])
    yield from (f"{folder}/" for folder in _folders(typed))


def _recipes(context: click.Context, typed: str) -> Iterator[str]:
    root = Path(typed).parent if "/" in typed else Path()
    for pattern in ("*.yaml", "*.yml"):
        yield from (str(file) for file in sorted(root.glob(pattern)))
    yield from (f"{folder}/" for folder in _folders(typed))


def _folders(typed: str) -> list[Path]:
    root = Path(typed).parent if "/" in typed else Path()
    return [one for one in sorted(root.iterdir()) if one.is_dir() and one.name[:1] != "."]


def _stages(context: click.Context, typed: str) -> Iterator[str]:
    from pipeline.chain.registry import Registry

    yield from (entry.name for entry in Registry.installed().entries())


def _shipped(context: click.Context, typed: str) -> Iterator[str]:
    from pipeline.recipe.shipped import shipped

    yield from shipped()


def _overrides(context: click.Context, typed: str) -> Iterator[str]:
    """Yield `slot.field=` for every field of the recipe's stages, and the values of a field whose
    values are known."""
    from pipeline.chain.registry import Registry
    from pipeline.execution import rundir
    from pipeline.recipe import read_recipe

    named = context.params.get("recipe") or Path(context.params["run_dir"]) / rundir.RECIPE
    recipe, _ = read_recipe(named)
    if recipe is None:
        return
    registry = Registry.installed()
    key, given, _ = typed.partition("=")
    for slot, spec in recipe.stages.items():
        fields = dict(_fields(spec.use, registry))
        fields["use"] = Literal[tuple(_alternatives(spec.use, registry))]
        for name, kind in fields.items():
            path = f"{slot}.{name}"
            if given and key == path:
                yield from (f"{path}={value}" for value in _values(kind))
            elif not given:
                yield f"{path}="


def _fields(use: str, registry: Registry) -> Iterator[tuple[str, Any]]:
    from typing import get_type_hints

    stage = registry.load(use)
    kinds = get_type_hints(stage)
    yield from ((name, kinds[name]) for name in getattr(stage, "__dataclass_fields__", ()))


def _alternatives(use: str, registry: Registry) -> list[str]:
    """Return the stages of the same kind."""
    kind = use.partition(".")[0]
    return [one.name for one in registry.entries() if one.name.startswith(f"{kind}.")]


def _values(kind: Any) -> Iterator[str]:
    """Yield the values of a type as they are written in a recipe, if there are few."""
    if kind is bool:
        yield from ("true", "false")
    elif kind is type(None):
        yield "null"
    elif get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif get_origin(kind) in (Union, types.UnionType):
        for inner in get_args(kind):
            yield from _values(inner)


RUN, RECIPE, STAGE = _quietly(_runs), _quietly(_recipes), _quietly(_stages)
SHIPPED, OVERRIDE = _quietly(_shipped), _quietly(_overrides)
