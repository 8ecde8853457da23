"""`pipe show --data`: samples as they would be trained on."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import click

from pipeline import terminal
from pipeline.artifacts import Sample
from pipeline.plan import plan_file
from pipeline.preview import Preview, Token, documents, preview
from pipeline.registry import Registry
from pipeline.terminal import bare

MARKS = "⟦", "⟧"
"""Around what is trained on, where there are no colours."""


def show_data(
    file: Path,
    overrides: Sequence[str],
    registry: Registry | None,
    *,
    count: int,
    as_json: bool,
) -> None:
    """Print `count` samples of a recipe's training data, and how many there are. What the stages
    say goes to stderr."""
    plan = plan_file(file, overrides, registry=registry)
    with preview(plan, _log()) as shown:
        indices = shown.indices(count)
        if as_json:
            click.echo(json.dumps(_as_json(shown, indices), indent=1))
            return
        click.echo(_summary(shown))
        colour = sys.stdout.isatty()
        for place, index in enumerate(indices):
            # a stream's own index says nothing to people
            number = place if shown.size is None else index
            text = _described(shown, index, number, colour=colour)
            click.echo(f"\n{text}", file=bare(sys.stdout))


def _log() -> logging.Logger:
    log = logging.Logger("pipe.show", logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stderr))
    return log


def _summary(shown: Preview) -> str:
    data = shown.data
    held = len(data.heldout) if data.heldout else 0
    packed = ", packed" if data.packed else ""
    size = "a stream of" if shown.size is None else shown.size
    return f"{size} samples to train on{packed}, {held} held out"


def _described(shown: Preview, index: int, number: int, *, colour: bool) -> str:
    sample = shown.data.train[index]
    parts = list(documents(sample))
    targets = shown.data.train.targets(index)
    head = f"sample {number}: {len(sample.input_ids)} tokens, {targets} to predict"
    texts = [_marked(shown, part, colour=colour) for part in parts]
    if sample.positions is None:
        return f"{head}\n{texts[0]}"
    lines = [
        f"--- document {number} of {len(parts)}\n{text}" for number, text in enumerate(texts, 1)
    ]
    return "\n".join([f"{head}, {len(parts)} documents", *lines])


def _marked(shown: Preview, tokens: Sequence[Token], *, colour: bool) -> str:
    """The text, in runs of tokens that are or are not trained on."""
    return "".join(_runs(shown, tokens, colour=colour))


def _runs(shown: Preview, tokens: Sequence[Token], *, colour: bool) -> Iterator[str]:
    for trained, run in groupby(tokens, key=lambda token: token.trained):
        text = terminal.shown(shown.tokenizer.decode([token.id for token in run]))
        if not trained:
            yield text
        elif colour:
            yield click.style(text, fg="green", bold=True)
        else:
            yield f"{MARKS[0]}{text}{MARKS[1]}"


def _as_json(shown: Preview, indices: Sequence[int]) -> dict[str, object]:
    data = shown.data
    return {
        "samples": shown.size,
        "heldout": len(data.heldout) if data.heldout else 0,
        "packed": data.packed,
        "shown": [
            {"place": place, "index": index, **_sample(data.train[index])}
            for place, index in enumerate(indices)
        ],
    }


def _sample(sample: Sample) -> dict[str, object]:
    positions = sample.positions
    return {
        "input_ids": sample.input_ids.tolist(),
        "labels": sample.labels.tolist(),
        "positions": None if positions is None else positions.tolist(),
    }
