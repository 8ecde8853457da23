"""Texts that a run has generated: by their prompts, and before and after its training."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MOST_PROMPTS = 3
MOST_LETTERS = 200


def by_prompt(found: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], dict[int, str]]:
    """Return number and text of each prompt of a run's records -> step -> answer. Of two answers of
    the same step, the later counts."""
    answers: dict[tuple[int, str], dict[int, str]] = {}
    for record in found:
        for one in record.get("generated", ()):
            by_step = answers.setdefault((one["number"], one["prompt"]), {})
            by_step[record["step"]] = one["text"]
    return answers


def before_and_after(found: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: each of the first prompts, and its answers before training and by the
    last step, from a run's metrics. Nothing without texts before the first step."""
    answers = by_prompt(found)
    last = max(itertools.chain(*answers.values()), default=0)
    both = (item for item in answers.items() if last and {0, last} <= item[1].keys())
    for (_, prompt), by_step in itertools.islice(both, MOST_PROMPTS):
        yield "prompt", _shown(prompt)
        yield "  before", _shown(by_step[0])
        yield "  after", _shown(by_step[last])


def _shown(text: str) -> str:
    line = " ".join(text.split())
    if not line:
        return "(empty answer)"
    return line if len(line) <= MOST_LETTERS else f"{line[:MOST_LETTERS].rstrip()} ..."
