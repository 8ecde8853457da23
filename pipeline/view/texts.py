"""Texts that a run has generated before and after its training, for its last lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MOST_PROMPTS = 3
MOST_LETTERS = 200


def before_and_after(found: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: each of the first prompts, and its answers before training and by the
    last step, from a run's metrics. Nothing without texts before the first step."""
    texts = [one for one in found if one.get("generated")]
    if len(texts) < 2 or texts[0]["step"] != 0:
        return
    last = {one["number"]: one for one in texts[-1]["generated"]}
    for before in texts[0]["generated"][:MOST_PROMPTS]:
        after = last.get(before["number"])
        if after is not None:
            yield "prompt", _shown(before["prompt"])
            yield "  before", _shown(before["text"])
            yield "  after", _shown(after["text"])


def _shown(text: Any) -> str:
    line = " ".join(str(text).split())
    if not line:
        return "(empty answer)"
    return line if len(line) <= MOST_LETTERS else f"{line[:MOST_LETTERS].rstrip()} ..."
