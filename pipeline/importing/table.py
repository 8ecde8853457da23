"""The outcomes of an import, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from pipeline.importing.translator import KeyOutcome, Translation
from pipeline.recipe.dump import inline, render

WIDTH = 44
"""Most characters in the column of keys, and of a value in it."""


def table(translation: Translation) -> Iterator[str]:
    """Yield a line for each key, for each missing recipe key, and a count of the outcomes."""
    outcomes = translation.outcomes
    width = min(WIDTH, max((len(_key(each)) for each in outcomes), default=0))
    file = None
    for each in outcomes:
        if each.file != file:
            file = each.file
            yield f"{file}:"
        yield f"  {_key(each):<{width}}  {each.outcome:<14}  {_explanation(each)}".rstrip()
    for key, what in translation.missing.items():
        yield f"fill in {key}: {what}"
    counts = Counter(each.outcome for each in outcomes)
    yield (
        f"{len(outcomes)} keys: {counts['translated']} translated, {counts['default']} by default, "
        f"{counts['not translated']} not translated, {counts['refused']} refused"
    )


def as_json(translation: Translation) -> dict[str, Any]:
    """Return the content of the table, and the recipe."""
    names = [field.name for field in fields(KeyOutcome)]
    keys = [{name: getattr(each, name) for name in names} for each in translation.outcomes]
    return {"recipe": translation.recipe, "missing": dict(translation.missing), "keys": keys}


def recipe_text(translation: Translation) -> str:
    """Return the recipe with its comments."""
    assert translation.recipe is not None
    return render(dict(translation.recipe), lambda path: translation.notes.get(path, ""))


def _key(outcome: KeyOutcome) -> str:
    value = "{...}" if isinstance(outcome.value, Mapping) else inline(outcome.value)
    return f"{outcome.key}: {value if len(value) <= WIDTH else value[: WIDTH - 3] + '...'}"


def _explanation(outcome: KeyOutcome) -> str:
    to = ", ".join(f"{key} = {json.dumps(value)}" for key, value in outcome.to.items())
    parts = "; ".join(part for part in (to, outcome.why) if part)
    return f"{parts} ({outcome.hint})".lstrip() if outcome.hint else parts
