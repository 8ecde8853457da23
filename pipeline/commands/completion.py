"""Completion in shells: `pipe completion`, and what arguments can be completed to.

Shells call `pipe` itself for this (click's mechanism), so all of it must be fast and silent."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem, get_completion_class

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
MOST_RUNS = 50
NO_SPACE = (
    "    return 0\n",
    "    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace\n"
    "    return 0\n",
)
"""The end of click's function for bash, and one that adds no space after a key or a folder."""


@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the shell code that completes `pipe` commands.

    For bash, put eval "$(pipe completion bash)" into ~/.bashrc. Completes commands, options,
    recipes, runs, stages, and the keys and values of overrides.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    main = click.get_current_context().find_root().command
    source = kind(main, {}, "pipe", "_PIPE_COMPLETE").source()
    click.echo(source.replace(*NO_SPACE) if shell == "bash" else source)


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


def _folder_in(typed: str) -> tuple[str, Path]:
    """Return the part of a path up to its last slash, as it was typed, and the folder it names."""
    head = typed[: typed.rfind("/") + 1]
    return head, Path(head).expanduser()


def _folders(typed: str) -> Iterator[str]:
    head, folder = _folder_in(typed)
    names = sorted(one.name for one in folder.iterdir() if one.is_dir() and one.name[:1] != ".")
    yield from (f"{head}{name}/" for name in names)


@_quietly
def runs(context: click.Context, typed: str) -> Iterator[str]:
    head, folder = _folder_in(typed if "/" in typed else "runs/")
    files = sorted(folder.glob("*/recipe.yaml"), key=lambda file: -file.stat().st_mtime)
    found = [f"{head}{file.parent.name}" for file in files]
    yield from found[:MOST_RUNS]
    yield from (folder for folder in _folders(typed) if folder[:-1] not in found)


@_quietly
def recipes(context: click.Context, typed: str) -> Iterator[str]:
    head, folder = _folder_in(typed)
    files = sorted(one.name for one in folder.iterdir() if one.suffix in (".yaml", ".yml"))
    yield from (f"{head}{name}" for name in files)
    yield from _folders(typed)


@_quietly
def stages(context: click.Context, typed: str) -> Iterator[str]:
    from pipeline.chain.registry import Registry

    yield from Registry.installed().names()


@_quietly
def shipped(context: click.Context, typed: str) -> Iterator[str]:
    from pipeline.recipe import includes

    yield from includes.shipped()


@_quietly
def overrides(context: click.Context, typed: str) -> Iterator[str]:
    """Yield `slot.field=` for every field of the recipe's stages, and the values of a field whose
    values are known."""
    from pipeline.chain.registry import Registry, kind_of
    from pipeline.contracts.signature import needs
    from pipeline.distributed.settings import Launch
    from pipeline.execution import rundir
    from pipeline.recipe import read_recipe

    arguments = (context.params.get(name) for name in ("recipe", "run_dir", "run"))
    named = Path(next(path for path in arguments if path is not None))
    recipe, _ = read_recipe(named / rundir.RECIPE if named.is_dir() else named)
    if recipe is None:
        return
    registry, earlier = Registry.installed(), list[str]()
    kinds = dict(_fields("launch", Launch))
    for slot, spec in recipe.stages.items():
        stage = registry.load(spec.use)
        kinds |= _fields(slot, stage)
        kinds |= {f"{slot}.takes.{one.parameter}": Literal[tuple(earlier)] for one in needs(stage)}
        earlier.append(slot)
        kinds[f"{slot}.use"] = Literal[tuple(registry.names(kind_of(spec.use)))]
    key, head = _key_in(typed, context.params.get("overrides") or ())
    if key is None:
        yield from (f"{path}=" for path in kinds)
    elif key in kinds:
        yield from (f"{head}{value}" for value in _values(kinds[key]))


def _key_in(typed: str, earlier: Sequence[str]) -> tuple[str | None, str]:
    """Return the key whose value is being typed, None before the `=`, and what of it belongs to the
    word: bash takes `key`, `=` and the value for three words, and click leaves an `=` out that is
    the last one."""
    key, given, _ = typed.partition("=")
    if given:
        return key, f"{key}="
    before, last = ("", "", *earlier)[-2:]
    if last == "=":
        return before, ""
    return (last, "") if last and "=" not in last and before != "=" else (None, "")


def _fields(slot: str, owner: type) -> Iterator[tuple[str, Any]]:
    """Yield `slot.field` and its type for the fields of a dataclass."""
    kinds = get_type_hints(owner)
    yield from ((f"{slot}.{n}", kinds[n]) for n in getattr(owner, "__dataclass_fields__", ()))


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
