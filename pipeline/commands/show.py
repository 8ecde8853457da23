"""`pipe show`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from pipeline.chain.elsewhere import explained
from pipeline.chain.plan import Plan, in_order, load_slots
from pipeline.chain.registry import Registry
from pipeline.commands.options import Count, json_option, overrides_argument, recipe_argument
from pipeline.errors import RecipeError
from pipeline.execution.in_process import Preview, Token, documents, previews
from pipeline.importing.unknown_keys import of_other_tools, plan_recipe
from pipeline.recipe import Recipe, RecipeSettings, read_recipe, unless_reported
from pipeline.recipe.dump import render
from pipeline.recipe.field_docs import plain_value
from pipeline.recipe.load import HEADER_KEYS, reserved
from pipeline.recipe.nodes import leaves
from pipeline.utils import terminal
from pipeline.utils.terminal import bare
from pipeline.utils.text import plural


@click.command()
@recipe_argument
@overrides_argument
@click.option("--origin", is_flag=True, help="Show the file and line that each value comes from.")
@click.option(
    "--data",
    "count",
    type=Count(min=1),
    help="Show this many training samples instead, with trained tokens marked.",
)
@json_option
@click.pass_obj
def show(
    registry: Registry | None,
    recipe: Path,
    overrides: tuple[str, ...],
    origin: bool,
    count: int | None,
    as_json: bool,
) -> None:
    """Show RECIPE with all its values filled in, or samples of its data.

    RECIPE is a file, or the folder of a run. Includes what it extends, OVERRIDES, interpolations
    and defaults; values from the environment stay references. No weights are read.
    """
    file = recipe / "recipe.yaml" if recipe.is_dir() else recipe
    if count is not None:
        plan = plan_recipe(file, overrides, registry=registry)
        _show_data(plan, count=count, as_json=as_json)
        return
    loaded, values = _resolved(file, overrides, registry or Registry.installed())
    if as_json:
        origins = {".".join(map(str, path)): loaded.origin(path) for path, _ in leaves(values)}
        click.echo(
            json.dumps({"recipe": values, "origins": origins} if origin else values, indent=2)
        )
    else:
        click.echo(render(values, loaded.origin if origin else None), nl=False)


def _resolved(
    file: Path, overrides: tuple[str, ...], registry: Registry
) -> tuple[Recipe, dict[str, Any]]:
    recipe, problems = read_recipe(file, overrides, registry.common_fields)
    if recipe is None:
        raise RecipeError(in_order(problems))
    _, stages, more = load_slots(recipe, registry)
    problems += unless_reported(more, problems)
    if problems:
        raise RecipeError(in_order(explained(problems, recipe, registry, of_other_tools)))
    public = recipe.public()
    header = plain_value(RecipeSettings(**{key: getattr(recipe, key) for key in HEADER_KEYS}))
    written = public.get("stages") or {}
    slots = {
        slot: {**reserved(written[slot]), **_filled(plain_value(stage), written[slot])}
        for slot, stage in stages.items()
    }
    return recipe, {**_filled(header, public), "stages": slots}


def _filled(values: Any, written: Any) -> Any:
    """Return `values`, which hold every default, with the recipe's own values as it writes them."""
    if not isinstance(values, dict) or not isinstance(written, dict):
        return written
    return {
        key: _filled(value, written[key]) if key in written else value
        for key, value in values.items()
    }


FIRST = 8
"""Values of a column that are shown."""
MARKS = "⟦", "⟧"
"""Marks around trained text on terminals without colours."""


def _show_data(plan: Plan, *, count: int, as_json: bool) -> None:
    """Print `count` samples of a recipe's training data, of each of several data slots, and the
    number of all samples. Messages of the stages go to stderr."""
    log = logging.Logger("pipe.show", logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stderr))
    with previews(plan, log) as found:
        if as_json:
            facts = {slot: _as_json(one, one.indices(count)) for slot, one in found.items()}
            (only,) = facts.values() if len(facts) == 1 else ({"slots": facts},)
            click.echo(json.dumps(only, indent=1))
            return
        for slot, shown in found.items():
            click.echo(f"{slot}: {shown.summary()}" if len(found) > 1 else shown.summary())
            colour = sys.stdout.isatty()
            for place, index in enumerate(shown.indices(count)):
                # a stream's own index is not shown: it has no meaning for users
                number = place if shown.size is None else index
                text = _described(shown, index, number, colour=colour)
                click.echo(f"\n{text}", file=bare(sys.stdout))


def _described(shown: Preview, index: int, number: int, *, colour: bool) -> str:
    sample = shown.data.train[index]
    parts = list(documents(sample))
    targets = shown.data.train.targets(index)
    tokens = plural(len(sample.input_ids), "token")
    head = f"sample {number}: {tokens}, {targets} to predict"
    values = zip(*sample.rows.values(), strict=True)
    rows = [dict(zip(sample.rows, row, strict=True)) for row in values]
    texts = [
        "\n".join([_marked(shown, part, colour=colour), *_columns(row)])
        for part, row in zip(parts, rows or [{}] * len(parts), strict=True)
    ]
    whole = [*_columns(sample.tokens), *_columns(sample.free)]
    if sample.positions is None:
        return "\n".join([head, texts[0], *whole])
    lines = [f"--- document {i} of {len(parts)}\n{text}" for i, text in enumerate(texts, 1)]
    return "\n".join([f"{head}, {plural(len(parts), 'document')}", *lines, *whole])


def _columns(columns: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each column of the data: its first values, and how many there are."""
    for name, values in columns.items():
        flat = values.flatten().tolist() if values.ndim else [values.item()]
        shown = ", ".join(f"{one:.6g}" for one in flat[:FIRST])
        shape = f", ... ({' x '.join(map(str, values.shape))})" if len(flat) > FIRST else ""
        yield f"{name}: {shown}{shape}"


def _marked(shown: Preview, tokens: Sequence[Token], *, colour: bool) -> str:
    """Return the text, with runs of tokens that are trained on coloured or marked."""
    texts = []
    for trained, run in groupby(tokens, key=lambda token: token.trained):
        text = terminal.shown(shown.tokenizer.decode([token.id for token in run]))
        if trained:
            text = click.style(text, fg="green", bold=True) if colour else text.join(MARKS)
        texts.append(text)
    return "".join(texts)


def _as_json(shown: Preview, indices: Sequence[int]) -> dict[str, object]:
    samples = []
    for place, index in enumerate(indices):
        sample = shown.data.train[index]
        facts = {
            "place": place,
            "index": index,
            "input_ids": sample.input_ids.tolist(),
            "labels": sample.labels.tolist(),
            "positions": None if sample.positions is None else sample.positions.tolist(),
            **{name: one.tolist() for name, one in {**sample.tokens, **sample.rows}.items()},
            **{name: list(one.shape) for name, one in sample.free.items()},
        }
        samples.append(facts)
    return {**shown.facts(), "shown": samples}
