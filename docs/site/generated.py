"""Pages that are made from the program itself: stages, the recipe's own keys, commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence

import click

from pipeline.chain.registry import Registry, kind_of
from pipeline.cli import COMMANDS, main
from pipeline.contracts.signature import gives, needs
from pipeline.recipe.fields import FieldRow, field_rows
from pipeline.recipe.load import RecipeSettings

CHAIN = [
    "model", "adapter", "precision", "data", "optimizer", "wrap", "average", "checkpoint", "track",
    "train", "consolidate", "export", "evaluate", "publish",
]  # fmt: skip
"""Kinds of stages in the order of a recipe."""


def pages() -> dict[str, str]:
    """Every generated page of the reference: its path, and its Markdown."""
    registry = Registry.installed()
    made = {"reference/recipe.md": recipe_page(), "reference/commands.md": command_page()}
    for kind in kinds(registry):
        made[f"reference/{kind}.md"] = kind_page(kind, registry)
    return made


def kinds(registry: Registry) -> list[str]:
    """Kinds of installed stages, in the order of a recipe; others come last."""
    found = dict.fromkeys(kind_of(name) for name in registry.names())
    return sorted(found, key=lambda kind: CHAIN.index(kind) if kind in CHAIN else len(CHAIN))


def stage_table(registry: Registry) -> str:
    """All stages with what they are, linked to their pages."""
    lines = ["| stage | |", "| --- | --- |"]
    for kind in kinds(registry):
        for name in registry.names(kind):
            first = summary(registry.load(name).__doc__ or "")
            lines.append(f"| [`{name}`](reference/{kind}.md#{anchor(name)}) | {first} |")
    return "\n".join(lines)


def summary(doc: str) -> str:
    """The first paragraph of a docstring, for a cell of a table."""
    first = " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())
    return re.sub(r"(?<!\\)\|", r"\\|", as_markdown(first))


def kind_page(kind: str, registry: Registry) -> str:
    """The stages of one kind, each with its fields."""
    parts = [f"# {kind}", "Made from the installed stages; `pipe stages NAME` prints the same."]
    for name in registry.names(kind):
        stage = registry.load(name)
        doc = inspect.cleandoc(stage.__doc__ or "")
        parts += [f"## {name} {{ #{anchor(name)} }}", as_markdown(doc)]
        parts += ["\n".join(chained(stage)), *fields(field_rows(stage), anchor(name))]
    return "\n\n".join(parts)


def chained(stage: type) -> Iterator[str]:
    """Yield what the stage takes from earlier slots, and what it returns to later ones."""
    wanted = [
        f"`{need.parameter}` (`{need.type.__name__}`{', if there is one' * need.optional})"
        for need in needs(stage)
    ]
    given = gives(stage)
    yield f"Needs {', '.join(wanted) or 'nothing'}. "
    yield f"Returns {f'`{given.__name__}`' if given else 'nothing'}."


def recipe_page() -> str:
    """The keys of a recipe next to its stages."""
    words = (
        "Keys at the top of a recipe, next to `stages` and `extends`. "
        "[Recipes](../recipes.md) says how files are merged."
    )
    return "\n\n".join(["# Top-level keys", words, *fields(field_rows(RecipeSettings), "recipe")])


def fields(rows: Sequence[FieldRow], place: str) -> Iterator[str]:
    """Rows as a list of definitions, each with an anchor of its own."""
    for row in rows:
        default = "required" if row.default is None else f"default `{row.default}`"
        facts = ", ".join(filter(None, [as_markdown(row.type), default, as_markdown(row.range)]))
        spot = f'<span id="{place}-{row.name.replace(".", "-")}"></span>'
        yield f'{spot}`{row.name}` <span class="type">{facts}</span>\n:   {as_markdown(row.doc)}'


def command_page() -> str:
    """Each command with its arguments and options, in the order of `pipe --help`."""
    parts = ["# Commands", "Made from the program; `pipe COMMAND --help` prints the same."]
    root = click.Context(main, info_name="pipe", **main.context_settings)
    for name in COMMANDS:
        command = main.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root)
        parts += [f"## pipe {name} {{ #{name} }}", f"    {usage(command, context)}"]
        parts += [as_markdown(inspect.cleandoc(command.help or "").replace("\b\n", ""))]
        parts += list(options(command, context))
    return "\n\n".join(parts)


def usage(command: click.Command, context: click.Context) -> str:
    """`pipe run [OPTIONS] RECIPE [OVERRIDES]...`"""
    return f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}"


def options(command: click.Command, context: click.Context) -> Iterator[str]:
    """Options with their texts, without --help."""
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and isinstance(parameter, click.Option) and parameter.name != "help":
            yield f"`{record[0]}`\n:   {as_markdown(record[1])}"


def as_markdown(text: str) -> str:
    """A docstring's text with everything outside of `code` taken literally."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if n % 2 else _literal(piece) for n, piece in enumerate(pieces))


def _literal(text: str) -> str:
    return re.sub(r"([*_<>\[\]|])", r"\\\1", text)


def anchor(name: str) -> str:
    """`wrap-fsdp` of `wrap.fsdp`."""
    return name.replace(".", "-")
