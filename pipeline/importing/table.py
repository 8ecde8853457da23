"""The account of an import, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.importing.translator import KeyOutcome, Translation
from pipeline.recipe.dump import inline, render

WIDEST = 44
"""Characters of a column that is lined up; longer texts push theirs out."""


def table(translation: Translation) -> Iterator[str]:
    """Lines: for each key what became of it, then what is missing, then a count."""
    width = min(WIDEST, max((len(_key(fate)) for fate in translation.fates), default=0))
    file = None
    for fate in translation.fates:
        if fate.file != file:
            file = fate.file
            yield f"{file}:"
        yield f"  {_key(fate):<{width}}  {fate.outcome:<10}  {_account(fate)}"
    for key, what in translation.missing.items():
        yield f"fill in {key}: {what}"
    yield summary(translation.fates)


def summary(fates: Sequence[KeyOutcome]) -> str:
    """How many keys had which fate."""
    counts = Counter(fate.outcome for fate in fates)
    return (
        f"{len(fates)} keys: {counts['translated']} translated, {counts['default']} by default, "
        f"{counts['refused']} refused"
    )


def as_json(translation: Translation) -> dict[str, Any]:
    """Everything that the table says, and the recipe."""
    return {
        "recipe": translation.recipe,
        "missing": dict(translation.missing),
        "keys": [vars(fate) for fate in translation.fates],
    }


def recipe_text(translation: Translation) -> str:
    """The recipe with its comments."""
    assert translation.recipe is not None
    return render(dict(translation.recipe), lambda path: translation.notes.get(path, ""))


def _key(fate: KeyOutcome) -> str:
    value = inline(fate.value) if not isinstance(fate.value, Mapping) else "{...}"
    return f"{fate.key}: {value if len(value) <= WIDEST else value[: WIDEST - 3] + '...'}"


def _account(fate: KeyOutcome) -> str:
    to = ", ".join(f"{key} = {json.dumps(value)}" for key, value in fate.to.items())
    parts = [part for part in (to, fate.why) if part]
    return "; ".join(parts) + (f" ({fate.hint})" if fate.hint else "")
