"""Profiles of models' weights alone, without running them."""

from __future__ import annotations

from pipeline.contracts.model import ModelSource
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import ModelShape
from pipeline.planning.trace.model import kinds, structure


def weights_alone(source: ModelSource, *, recomputed: bool = False) -> Profile:
    """Return a profile that has only its weights."""
    whole = structure(source)
    numbers = kinds(whole.signatures)
    places = [numbers.index(kind) for kind in sorted(set(numbers))]
    elements = sum(one.elements for one in whole.weights)
    model = ModelShape(
        root=tuple(whole.root),
        kinds=tuple(tuple(whole.blocks[place]) for place in places),
        blocks=tuple(numbers),
        late=(),
        tied=whole.tied,
        ends=whole.ends,
        vocabulary=source.vocab_size,
        parameters=elements,
        exported=elements,
        proven=elements,
    )
    again = (recomputed,) * len(places)
    return Profile(model=model, parts={}, recomputed=again)
