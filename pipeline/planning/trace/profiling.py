"""Profile a model's parts: run each kind once, forward and backward, and keep what it took."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.artifacts import ModelSource
from pipeline.errors import StageError
from pipeline.planning.job import Job
from pipeline.planning.planner import Extent
from pipeline.planning.profile import NOTHING, Line, Part, Peak, Profile, fullest
from pipeline.planning.shapes import ModelShape
from pipeline.planning.timeline import BACKWARD, FORWARD
from pipeline.planning.trace.run import Traced, declared, run
from pipeline.planning.trace.session import HEAD, INPUT, LOSS, START
from pipeline.planning.trace.structure import Structure, kinds, prefix, structure
from pipeline.planning.trace.tracker import Level, Stretch

SAMPLES = 1, 2
"""Sizes of micro-batches that are run; every other lies on the line through them."""

Pieces = dict[tuple[str, Any], list[Stretch]]
"""Phase and part of the model -> its stretches: from its beginning, and from each gradient."""


def profile(job: Job) -> Profile:
    """Run the parts of a job's model. Raises StageError for a model that needs values."""
    whole = structure(declared(job))
    numbers = kinds(whole.signatures)
    # The last block that runs stands for none.
    runs = _runs(job, whole, prefix(numbers) + 1)
    parts = _Parts(runs, whole)
    first = [numbers.index(kind) for kind in range(max(numbers, default=-1) + 1)]
    return Profile(
        model=replace(
            _shape(runs[0].source, whole, numbers, first, parts.late),
            caveats=tuple(_idle(whole, first, parts.given)),
        ),
        length=job.samples.length,
        start=parts.part(FORWARD, START),
        blocks=tuple(parts.part(FORWARD, place) for place in first),
        head=parts.part(FORWARD, HEAD),
        loss=parts.part(FORWARD, LOSS),
        loss_back=parts.part(BACKWARD, START),
        head_back=parts.part(BACKWARD, HEAD),
        blocks_back=tuple(parts.part(BACKWARD, place) for place in first),
        start_back=parts.part(BACKWARD, INPUT),
        recomputed=tuple(parts.repeats(place) for place in first),
    )


def _runs(job: Job, whole: Structure, blocks: int) -> list[Traced]:
    """One micro-batch of each size through the first so many blocks, or through all where a
    shallower model has others. Raises StageError where even then the blocks are others."""
    for depth in dict.fromkeys([min(blocks, len(whole.names)), None]):
        found = []
        for samples in SAMPLES:
            traced = run(job, extent=Extent(blocks=depth, samples=samples), bare=True)
            count = len(traced.built.names)
            if [*traced.built.signatures] != [*whole.signatures[:count]]:
                break
            found.append(traced)
        else:
            return found
    raise StageError("the model's blocks cannot be told apart")


class _Parts:
    """The parts of a model, as functions of samples."""

    def __init__(self, runs: Sequence[Traced], whole: Structure) -> None:
        self._names = runs[0].names
        self._pieces = [_pieces(one.stretches, self._names) for one in runs]
        self._elements = {weight.name: weight.elements for weight in whole.weights}
        root = {weight.name for weight in whole.root}
        early = [one for part in (HEAD, START) for one in self._pieces[0].get((BACKWARD, part), [])]
        names = (self._names.get(str(one.position.part)) for one in early)
        every = [one for pieces in self._pieces[0].values() for one in pieces]
        self.given = {self._names.get(str(one.position.part)) for one in every}
        """Names of the weights that get a gradient."""
        self.late = tuple(dict.fromkeys(name for name in names if name in root and name))
        """Names of the root's weights whose gradients come before those of any block."""

    def repeats(self, place: int) -> bool:
        """Whether a block is computed again in backward."""
        return any(one.repeats for one in self._pieces[0].get((BACKWARD, place), ()))

    def part(self, phase: str, where: Any) -> Part:
        """Memory and work of a part; none for one that did not run."""
        first, second = (pieces.get((phase, where), []) for pieces in self._pieces)
        if not first or len(first) != len(second):
            return NOTHING
        base, end = ([stretches[at].levels[at] for stretches in (first, second)] for at in (0, -1))

        def total(field: str) -> Line:
            return _line(*(sum(getattr(one, field) for one in two) for two in (first, second)))

        return Part(
            kept=_line(*(e.device - b.device for e, b in zip(end, base, strict=True))),
            offloaded=_line(*(e.host - b.host for e, b in zip(end, base, strict=True))),
            peaks=fullest(self._peaks(first, second, base)),
            products=total("products"),
            attention=total("attention"),
            again=total("again"),
            made=total("made"),
        )

    def _peaks(
        self, first: Sequence[Stretch], second: Sequence[Stretch], base: Sequence[Level]
    ) -> list[Peak]:
        found: list[Peak] = []
        arrived = 0
        for one, other in zip(first, second, strict=True):
            newest = self._newest(one)
            arrived += newest
            lines = [
                _line(low.device - base[0].device, high.device - base[1].device)
                for low, high in _aligned(one.levels, other.levels)
            ]
            found.append(Peak(lines[0], arrived, newest))
            found += [Peak(line, arrived) for line in lines]
        return found

    def _newest(self, stretch: Stretch) -> int:
        """Elements of the weight whose gradient begins a stretch."""
        name = self._names.get(str(stretch.position.part))
        return self._elements.get(name, 0) if name else 0


def _pieces(stretches: Sequence[Stretch], names: Mapping[str, str]) -> Pieces:
    found: Pieces = {}
    part: Any = START
    for stretch in stretches:
        phase, visit, mark = stretch.position
        if phase in (FORWARD, BACKWARD) and not visit:
            part = part if isinstance(mark, str) and mark in names else mark
            found.setdefault((phase, part), []).append(stretch)
    return found


def _line(low: float, high: float) -> Line:
    """The line through the amounts of both sizes."""
    slope = (high - low) / (SAMPLES[1] - SAMPLES[0])
    return Line(low - slope * SAMPLES[0], slope)


def _aligned(first: Sequence[Level], second: Sequence[Level]) -> list[tuple[Level, Level]]:
    """Levels of two sizes that belong to each other: one by one, or, where a size took another
    way, the beginnings, the highest and the ends."""
    if len(first) == len(second):
        return [*zip(first, second, strict=True)]
    return [(first[0], second[0]), (max(first), max(second)), (first[-1], second[-1])]


def _idle(whole: Structure, first: Sequence[int], given: Collection[str | None]) -> Iterator[str]:
    """Says which trained weights get no gradient."""
    ran = [*whole.root, *(weight for place in first for weight in whole.blocks[place])]
    idle = [one.name for one in ran if one.trained and one.name not in given]
    if idle:
        shown = ", ".join(idle[:2]) + " and others" * (len(idle) > 2)
        yield f"that some weights get no gradient, and so no state of the optimizer: {shown}"


def _shape(
    source: ModelSource,
    whole: Structure,
    numbers: Sequence[int],
    first: Sequence[int],
    late: Sequence[str],
) -> ModelShape:
    exported = whole if source.exported is source else structure(source.exported)
    known = {weight.name for weight in exported.weights}
    root = sum(weight.elements for weight in exported.root)
    blocks = [sum(one.elements for one in exported.blocks[place]) for place in first]
    added = [
        sum(one.elements for one in whole.blocks[place] if one.trained and one.name not in known)
        for place in first
    ]
    return ModelShape(
        root=tuple(whole.root),
        kinds=tuple(tuple(whole.blocks[place]) for place in first),
        blocks=tuple(numbers),
        late=tuple(late),
        tied=whole.tied,
        vocabulary=source.vocab_size,
        parameters=root + sum(blocks[kind] + added[kind] for kind in numbers),
        exported=root + sum(blocks[kind] for kind in numbers),
        proven=root + max(blocks, default=0),
    )
