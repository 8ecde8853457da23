"""The numbers of a model that was run alone, as a story for a strategy's arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.forecast.phases import BACKWARD, FORWARD, LOAD, RESUME, SAVE, UPDATE
from pipeline.forecast.placement import Placement
from pipeline.forecast.shapes import ModelShape, Weight
from pipeline.forecast.tape import GRADIENTS, Tape, Value
from pipeline.tracing.meter import REST, Meter, Unit
from pipeline.tracing.session import HEAD, INPUT, LOSS, START
from pipeline.tracing.structure import Structure


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is metered between two marks, relative to the first."""

    gradient: str | None
    """Parameter whose gradient came first of all."""
    peak: int
    change: int


Pieces = Mapping[tuple[str, Unit], Sequence[Piece]]
"""Phase and part of the model -> in order."""


def pieces(meter: Meter, names: Mapping[str, str]) -> Pieces:
    """Those of the first micro-batch; `names` are the model's parameters, each with what it is
    called in a piece."""
    found: dict[tuple[str, Unit], list[Piece]] = {}
    order = [*meter.levels]
    unit: Unit = START
    for moment, after in itertools.pairwise(order):
        phase, visit, mark = moment
        if phase not in (FORWARD, BACKWARD) or visit:
            continue
        gradient = names.get(mark) if isinstance(mark, str) else None
        unit = unit if gradient else mark
        level = meter.levels[moment]
        found.setdefault((phase, unit), []).append(
            Piece(
                gradient=gradient,
                peak=meter.moments[moment].bytes - level,
                change=meter.levels[after] - level,
            )
        )
    return found


class Replay:
    """Micro-batches and steps of one rank: activations as metered, the rest as a placement says.

    `built` is the structure of what was metered, `kinds` that of which kind each block of `model`
    is: the number of one that was metered.
    """

    def __init__(
        self,
        model: ModelShape,
        placement: Placement,
        metered: Pieces,
        built: Structure,
        kinds: Sequence[int],
        compute: int,
    ) -> None:
        self._model = model
        self._placement = placement
        self._metered = metered
        self._built = built
        self._kinds = kinds
        self._compute = compute
        self._tape = Tape(placement.ledger)
        self._root = dict(zip((w.name for w in built.root), model.root, strict=True))

    def tell(self, microbatches: int) -> None:
        """Two steps, as a stage that trains tells them."""
        ledger = self._placement.ledger
        ledger.phase(LOAD)
        self._placement.load()
        for _ in range(2):
            for number in range(microbatches):
                self._microbatch(last=number == microbatches - 1)
            ledger.phase(UPDATE)
            self._placement.step()
        for phase in (SAVE, RESUME):
            ledger.phase(phase)

    def _microbatch(self, *, last: bool) -> None:
        placement, tape = self._placement, self._tape
        tape.ledger.phase(FORWARD)
        placement.begin(last=last)
        placement.before_forward(None)
        root = self._use(self._model.root)
        self._walk(self._metered[FORWARD, START])
        blocks = [self._forward(place) for place in range(len(self._kinds))]
        self._walk(self._metered.get((FORWARD, HEAD), ()))
        placement.after_forward(None)
        self._walk(self._metered[FORWARD, LOSS])
        tape.ledger.phase(BACKWARD)
        placement.before_backward(None)
        named = {name: root[weight] for name, weight in self._root.items()}
        self._walk(self._metered[BACKWARD, START], named)
        placement.backward_at_output()
        self._walk(self._metered.get((BACKWARD, HEAD), ()), named)
        for place in reversed(range(len(blocks))):
            self._backward(place, blocks[place], named)
        self._walk(self._metered.get((BACKWARD, INPUT), ()), named)
        tape.run_back()
        tape.drop(*root.values())
        placement.after_backward(None)

    def _use(self, weights: Sequence[Weight]) -> dict[Weight, Value]:
        return {w: self._placement.use(self._tape, w, self._compute) for w in weights}

    def _forward(self, place: int) -> tuple[int, dict[Weight, Value]]:
        self._placement.before_forward(place)
        mark, used = self._tape.mark(), self._use(self._model.blocks[place].weights)
        self._walk(self._metered[FORWARD, self._kinds[place]])
        self._placement.after_forward(place)
        return mark, used

    def _backward(
        self, place: int, used: tuple[int, dict[Weight, Value]], root: Mapping[str, Value]
    ) -> None:
        self._placement.before_backward(place)
        mark, values = used
        kind = self._kinds[place]
        named = dict(zip((w.name for w in self._built.blocks[kind]), values.values(), strict=True))
        self._walk(self._metered[BACKWARD, kind], {**named, **(root if place == 0 else {})})
        self._tape.run_back(mark)
        self._tape.drop(*values.values())
        self._placement.after_backward(place)

    def _walk(self, metered: Iterable[Piece], named: Mapping[str, Value] | None = None) -> None:
        ledger = self._placement.ledger
        for piece in metered:
            value = (named or {}).get(piece.gradient or "")
            if value is not None:
                self._tape.accumulate(value, self._gradient(piece.gradient or ""))
            ledger.pulse(REST, piece.peak)
            ledger.change(REST, piece.change)

    def _gradient(self, name: str) -> Value:
        weights = (*self._built.root, *(w for block in self._built.blocks for w in block))
        size = next(weight.elements for weight in weights if weight.name == name)
        made = self._tape.make(size * self._compute, GRADIENTS)
        made.shared = True  # as products of matrices give it, by which tied weights are first used
        return made


def kinds(count: int, metered: int, period: int) -> Iterator[int]:
    """For each of so many blocks, the number of one like it among those metered, whose kinds come
    again after a period. Those at the ends stand for those at the ends."""
    front = metered // 2
    for place in range(count):
        if place < front:
            yield place
        elif place >= count - (metered - front):
            yield place - (count - metered)
        else:
            yield front + (place - front) % period
