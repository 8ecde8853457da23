"""Profile a model's parts: run each kind of block once, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.errors import StageError
from pipeline.planning.forecast import BACKWARD, FORWARD, Traffic
from pipeline.planning.planner import Job, TraceScope
from pipeline.planning.profile import NOTHING, Line, Part, Peak, Profile, fullest
from pipeline.planning.shapes import ModelShape, Weight
from pipeline.planning.trace.model import Structure, kinds, structure
from pipeline.planning.trace.run import BareModel, declared, run
from pipeline.planning.trace.torch_compat import Link
from pipeline.planning.trace.tracker import HEAD, INPUT, LOSS, START, Level, Stretch

SAMPLES = 1, 2
"""Sizes of micro-batches that are run; every other lies on the line through them."""
ROOT = (
    ("forward", "embeddings", FORWARD, START),
    ("forward", "head", FORWARD, HEAD),
    ("loss", "head", FORWARD, LOSS),
    ("begin", "head", BACKWARD, START),
    ("backward", "head", BACKWARD, HEAD),
    ("backward", "embeddings", BACKWARD, INPUT),
)
"""Event and unit of a strategy's moments, phase and mark of a trace, of parts outside blocks."""

UNEVEN = "experts that get more tokens than others: routing is taken to be balanced"
"""A cost that a plan of divided experts leaves out."""

Pieces = dict[tuple[str, Any], list[Stretch]]
"""Phase and part of the model -> its stretches: from its beginning, and from each gradient on."""


def profile(job: Job) -> Profile:
    """Run the parts of a job's model. Raises StageError for a model that needs values."""
    source = declared(job)
    whole = structure(source.skeleton)
    numbers = kinds(whole.signatures)
    first = [numbers.index(kind) for kind in range(max(numbers, default=-1) + 1)]
    # One more: no kind is measured on the last block that runs.
    runs = _runs(job, whole, max(first, default=-1) + 2)
    parts = _Parts(runs)
    # A model that is trained as a whole has no adapters, which are not exported.
    bare = source.skeleton is not source or all(weight.trained for weight in whole.weights)
    plain = whole if bare else structure(source.export_view)
    found = {f"{event} {unit}": parts.part(phase, where) for event, unit, phase, where in ROOT}
    for kind, place in enumerate(first):
        found[f"forward {kind}"] = parts.part(FORWARD, place)
        found[f"backward {kind}"] = parts.part(BACKWARD, place)
    units = {f"backward {kind}": runs[0].built.blocks[place] for kind, place in enumerate(first)}
    units["backward head"] = [one for one in runs[0].built.root if one.name in parts.early]
    for name, weights in units.items():
        sizes = (sum(run.deferred.get(one.name, 0) for one in weights) for run in runs)
        found[name] = replace(found[name], deferred=_line(*sizes))
    return Profile(
        model=_shape(source.vocab_size, plain, runs[0], numbers, first, parts),
        parts=found,
        recomputed=(*map(parts.repeats, first), *(False for _ in whole.towers)),
    )


def _runs(job: Job, whole: Structure, blocks: int) -> list[BareModel]:
    """Run one micro-batch of each size through the first `blocks` blocks, or through all if a
    shallower model has other blocks. Raises StageError if even all differ."""
    for depth in dict.fromkeys([min(blocks, len(whole.blocks)), None]):
        found = [run(job, TraceScope(blocks=depth, samples=size)) for size in SAMPLES]
        here = structure(found[0].source.skeleton)
        if here.root == whole.root and here.signatures == whole.signatures[: len(here.blocks)]:
            return found
    raise StageError("the model's blocks differ from one build to the next")


class _Parts:
    """The parts of a model, as functions of samples."""

    def __init__(self, runs: Sequence[BareModel]) -> None:
        self._names = runs[0].names
        self._pieces = [_pieces(one.stretches, self._names) for one in runs]
        self._groups = runs[0].divided.groups
        parts = map(runs[0].divided.part, runs[0].built.weights)
        self._elements = {weight.name: weight.elements for weight in parts}
        blocks = range(len(runs[0].built.blocks))
        if any(len(self._pieces[0].get((FORWARD, place), ())) > 1 for place in blocks):
            raise StageError(
                "the model runs some of its blocks more than once",
                hint="`pipe bench` measures its memory",
            )
        self.given = self._given(*self._pieces[0])
        """Names of the weights that get a gradient."""
        self.early = self._given((BACKWARD, START), (BACKWARD, HEAD))
        """Names of the weights that get a gradient before those of blocks."""

    def _given(self, *parts: tuple[str, Any]) -> Collection[str]:
        stretches = (one for part in parts for one in self._pieces[0].get(part, ()))
        names = (self._names.get(str(one.position.part)) for one in stretches)
        return dict.fromkeys(name for name in names if name)

    def repeats(self, place: int) -> bool:
        """Whether a block is recomputed in backward."""
        return any(one.repeats for one in self._pieces[0].get((BACKWARD, place), ()))

    def part(self, phase: str, where: Any) -> Part:
        """Memory and work of a part; empty if it did not run."""
        first, second = (pieces.get((phase, where), []) for pieces in self._pieces)
        if not first or len(first) != len(second):
            return NOTHING
        base, end = ([stretches[at].levels[at] for stretches in (first, second)] for at in (0, -1))
        if (phase, where) == (FORWARD, HEAD):  # begins before the last block has returned
            base = [_settled(stretches[0].levels) for stretches in (first, second)]

        def total(field: str) -> Line:
            return _line(*(sum(one.work[field] for one in two) for two in (first, second)))

        return Part(
            kept=_line(*(e.device - b.device for e, b in zip(end, base, strict=True))),
            offloaded=_line(*(e.host - b.host for e, b in zip(end, base, strict=True))),
            peaks=fullest(self._peaks(first, second, base)),
            **{field: total(field) for field in ("products", "attention", "again", "made")},
            exchanges=tuple(self._exchanges(first, second)),
        )

    def _exchanges(
        self, first: Sequence[Stretch], second: Sequence[Stretch]
    ) -> Iterator[tuple[Traffic, Line]]:
        for link in dict.fromkeys(what for one in second for what in one.work):
            if isinstance(link, Link) and link.group in self._groups and len(link.ranks) > 1:
                kind = Traffic(
                    collective=link.collective, bytes=0, ranks=len(link.ranks),
                    apart=link.ranks[1] - link.ranks[0], what=self._groups[link.group], waits=True,
                )  # fmt: skip
                yield kind, _line(*(sum(one.work[link] for one in two) for two in (first, second)))

    def _peaks(
        self, first: Sequence[Stretch], second: Sequence[Stretch], base: Sequence[Level]
    ) -> Iterator[Peak]:
        arrived = 0
        for one, other in zip(first, second, strict=True):
            # Elements of the weight whose gradient begins the stretch.
            newest = self._elements.get(self._names.get(str(one.position.part), ""), 0)
            arrived += newest
            levels = [one.levels, other.levels]
            if len(one.levels) != len(other.levels):  # beginnings, the highest, and ends
                levels = [[each[0], max(each), each[-1]] for each in levels]
            for number, (low, high) in enumerate(zip(*levels, strict=True)):
                line = _line(low.device - base[0].device, high.device - base[1].device)
                yield Peak(line, arrived, newest if number == 0 else 0)


def _pieces(stretches: Sequence[Stretch], names: Mapping[str, str]) -> Pieces:
    found: Pieces = {}
    part: Any = START
    for stretch in stretches:
        phase, mark = stretch.position
        if phase in (FORWARD, BACKWARD):
            part = part if isinstance(mark, str) and mark in names else mark
            found.setdefault((phase, part), []).append(stretch)
    return found


def _line(low: float, high: float) -> Line:
    """The line through the amounts of both sizes."""
    slope = (high - low) / (SAMPLES[1] - SAMPLES[0])
    return Line(low - slope * SAMPLES[0], slope)


def _settled(levels: Sequence[Level]) -> Level:
    """The level after everything that is freed at the beginning."""
    falls = itertools.takewhile(lambda pair: pair[1] <= pair[0], itertools.pairwise(levels))
    return min([levels[0], *(after for _, after in falls)])


def _shape(
    vocabulary: int, plain: Structure, traced: BareModel, numbers: Sequence[int],
    first: Sequence[int], parts: _Parts,
) -> ModelShape:  # fmt: skip
    """The whole model, from the built blocks of each kind (`traced`) and the exported weights
    (`plain`)."""
    built, divided = traced.built, traced.divided
    known = {weight.name for weight in plain.weights}
    root = _elements([*plain.root, *itertools.chain(*plain.towers)])
    blocks = [_elements(plain.blocks[place]) for place in first]
    added = [
        _elements(one for one in built.blocks[place] if one.trained and one.name not in known)
        for place in first
    ]
    idle = [w.name for w in built.weights if w.trained and w.name not in parts.given]

    def shaped(weights: Sequence[Weight]) -> tuple[Weight, ...]:
        own = map(divided.part, weights)
        return tuple(replace(w, trained=w.trained and w.name not in idle) for w in own)

    return ModelShape(
        root=shaped(built.root),
        kinds=tuple(map(shaped, [*(built.blocks[place] for place in first), *built.towers])),
        # Text does not pass through the blocks of towers, and each is a further kind.
        blocks=(*range(len(first), len(first) + len(built.towers)), *numbers),
        late=tuple(one.name for one in built.root if one.name in parts.early),
        tied=built.tied,
        behind=tuple(built.behind),
        ends=built.ends,
        vocabulary=vocabulary,
        parameters=root + sum(blocks[kind] + added[kind] for kind in numbers),
        exported=root + sum(blocks[kind] for kind in numbers),
        proven=root + max(blocks, default=0),
        caveats=(
            *(f"memory of {name}, which gets no gradient here" for name in idle[:1]),
            *((UNEVEN,) if divided.experts else ()),
        ),
    )


def _elements(weights: Iterable[Weight]) -> int:
    return sum(weight.elements for weight in weights)
