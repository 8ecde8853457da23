"""What a model answered to the same prompts while it was trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.utils.terminal import shown
from pipeline.view.texts import by_prompt

MOST_PROMPTS = 40
MOST_ANSWERS = 20
"""Answers to a prompt: the first, and the newest."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The text that a model wrote after a prompt."""

    when: str
    """`before training`, `step 20`."""
    text: str
    """Empty where it wrote nothing but white space."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt, and its answers in the order of the training."""

    text: str
    shown: list[Answer]
    """The first and the last, to be compared; one where there is one."""
    between: list[Answer]
    left_out: int


def prompts(records: Iterable[Mapping[str, Any]]) -> list[Prompt]:
    """Return the newest prompts of a run's records with their answers."""
    found = list(by_prompt(records).items())[-MOST_PROMPTS:]
    return [_prompt(text, by_step) for (_, text), by_step in found]


def _prompt(text: str, by_step: Mapping[int, str]) -> Prompt:
    first, *rest = _answers(by_step)
    kept = rest[max(0, len(rest) - MOST_ANSWERS + 1) :]
    return Prompt(
        text=shown(text),
        shown=[first, *kept[-1:]],
        between=kept[:-1],
        left_out=len(rest) - len(kept),
    )


def _answers(by_step: Mapping[int, str]) -> Iterator[Answer]:
    for step in sorted(by_step):
        when = f"step {step}" if step else "before training"
        text = by_step[step]
        yield Answer(when=when, text=shown(text) if text.strip() else "")
