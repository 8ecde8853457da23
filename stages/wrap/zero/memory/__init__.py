"""What ZeRO holds of a model, in closed form: weights, gradients, states, buffers, temporaries.

Activations and their gradients are not here. Formulas name DeepSpeed's file; N are trained and F
frozen elements, n those of one parameter, W ranks, `bucket` is `reduce_bucket_size`, `filled` what
a reduction finds in it. docs/zero-memory.md says how they were measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.planning.strategy import Gradients, Item
from stages.wrap.zero.memory.gathering import gathers
from stages.wrap.zero.memory.replicated import Accumulated, Replicated, in_part
from stages.wrap.zero.memory.sharded import Sharded
from stages.wrap.zero.memory.terms import (
    ACCUMULATED,
    BYTES,
    Fill,
    Moment,
    Place,
    Setting,
    Weight,
    Weights,
    Where,
)

__all__ = [
    "ACCUMULATED",
    "BYTES",
    "Gradients",
    "Item",
    "Moment",
    "Place",
    "Setting",
    "Weight",
    "Weights",
    "Where",
    "gathers",
    "gradients",
    "held",
    "in_part",
    "peak",
]


def held(
    setting: Setting,
    weights: Weights,
    moment: Moment,
    *,
    place: Place = "head",
    accumulating: bool = False,
) -> list[Item]:
    """Bytes on one rank at a moment; of forward, backward and reduce at a place. `accumulating`:
    gradients of an earlier micro-batch are there. Backward is without what the place's own
    gradients leave behind: see `gradients`."""
    strategy = _strategy(setting, weights)
    if moment == "load":
        return list(strategy.load())
    return [*strategy.states(), *_more(strategy, moment, place, accumulating)]


def gradients(setting: Setting, weights: Weights) -> Gradients:
    """What a weight's gradient leaves behind in backward."""
    return _strategy(setting, weights).gradients()


def peak(
    setting: Setting,
    weights: Weights,
    moment: Moment,
    *,
    accumulating: bool = False,
    where: Where | None = None,
) -> int:
    """The most bytes at a moment at any place, in backward with reductions and with the gradients
    that are being computed. They are those on the device, the host or the disk, or all (None)."""
    places: list[Place] = ["embeddings", *range(len(weights.blocks)), "head"]
    moments: list[Moment] = ["backward", "reduce"] if moment == "backward" else [moment]
    computed = where in ("device", None)
    return max(
        _bytes(held(setting, weights, one, place=place, accumulating=accumulating), where)
        + (_own(setting, weights, place, accumulating) * computed if one == "backward" else 0)
        for one in moments
        for place in places
    )


def _bytes(items: list[Item], where: Where | None = None) -> int:
    return sum(item.bytes for item in items if where in (item.where, None))


def _own(setting: Setting, weights: Weights, place: Place, accumulating: bool) -> int:
    """Of a place's own gradients, when the last of them is computed."""
    own = [elements for where, elements in weights.reversed if where == place]
    if not own:
        return 0
    each = gradients(setting, weights)
    if accumulating and setting.stage.stage == 1:
        return (each.kept + each.passing) * max(own)
    return each.kept * sum(own) + each.passing * max(own)


def _more(
    strategy: Replicated | Sharded, moment: Moment, place: Place, accumulating: bool
) -> Iterator[Item]:
    """On top of the states."""
    if moment == "step":
        yield from strategy.step()
    elif moment in ("backward", "reduce"):
        yield from strategy.whole(place, forward=False)
        yield from _gradients(strategy, place, moment == "reduce", accumulating)
    else:
        yield from strategy.summed() if accumulating else ()
        if moment == "between":
            yield from strategy.persistent()
        else:
            at = "head" if moment == "loss" else place
            yield from strategy.whole(at, forward=moment != "begin")


def _gradients(
    strategy: Replicated | Sharded, place: Place, reducing: bool, accumulating: bool
) -> list[Item]:
    order, fills = strategy.weights.reversed, strategy.reductions()
    began = next((number for number, (where, _) in enumerate(order) if where == place), 0)
    before = sum(elements for _, elements in order[:began])
    own = [fill for fill in fills if fill.place == place] if reducing else []

    def beside(fill: Fill | None, *, reduced: bool) -> list[Item]:
        items = list(strategy.backward(before, reduced=reduced, accumulating=accumulating))
        more = () if fill is None else strategy.unreduced(fill)
        return [*items, *_tied(strategy, fill), *more]

    if not own:
        return beside(None, reduced=any(fill.after < began for fill in fills))
    ways = []
    for fill in own:
        reduced = strategy.sums_at_once or fill != fills[0]
        ways.append([*beside(fill, reduced=reduced), *strategy.reduction(fill)])
        ways.append(beside(fill, reduced=True))
    return max(ways, key=_bytes)


def _tied(strategy: Replicated | Sharded, fill: Fill | None = None) -> list[Item]:
    """A tied head's gradient is kept by autograd until that of the embeddings is there."""
    weights, c = strategy.weights, strategy.setting.compute_bytes
    complete = fill is not None and fill.after == len(weights.reversed)
    if complete or not weights.tied or not weights.root[0].trained:
        return []
    return [Item("the head's gradient", "device", c * weights.root[0].elements, f"{c} n")]


def _strategy(setting: Setting, weights: Weights) -> Replicated | Sharded:
    if setting.stage.stage == 3:
        return Sharded(setting, weights)
    offloaded = setting.stage.offload_optimizer is not None
    if setting.stage.stage == 1 and setting.compute == "bf16" and not offloaded:
        return Accumulated(setting, weights)
    return Replicated(setting, weights)
