"""The outcomes of an import, as a table for people and as JSON for programs."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from pipeline.importing.translator import KeyOutcome, Translation
from pipeline.recipe.dump import inline, render
from pipeline.utils import align, plural

WIDTH = 44
"""Most characters of a value in the column of keys."""


def table(translation: Translation) -> Iterator[str]:
    """Yield a line for each key, for each missing recipe key, and a count of the outcomes."""
    outcomes = translation.outcomes
    rows = []
    for each in outcomes:
        value = "{...}" if isinstance(each.value, Mapping) else inline(each.value)
        short = value if len(value) <= WIDTH else f"{value[: WIDTH - 3]}..."
        to = ", ".join(f"{key} = {json.dumps(new)}" for key, new in each.to.items())
        why = "; ".join(part for part in (to, each.why) if part)
        why = f"{why} ({each.hint})".lstrip() if each.hint else why
        rows.append((f"  {each.key}: {short}", each.outcome, why))
    lines = zip(outcomes, align(rows, left=3), strict=True)
    for file, keys in itertools.groupby(lines, key=lambda pair: pair[0].file):
        yield f"{file}:"
        yield from (line for _, line in keys)
    for key, what in translation.missing.items():
        yield f"fill in {key}: {what}"
    counts = Counter(each.outcome for each in outcomes)
    total = plural(len(outcomes), "key")
    yield (
        f"{total}: {counts['translated']} translated, {counts['default']} by default, "
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
