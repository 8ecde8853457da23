"""Run a model's parts once, forward and backward, and keep what they took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import StageError
from pipeline.planning.profile import NOTHING, Line, Part, Peak, Profile, fullest
from pipeline.planning.shapes import ModelShape
from pipeline.planning.timeline import BACKWARD, FORWARD
from pipeline.planning.trace.recorder import Recorder, Stretch, offloading
from pipeline.planning.trace.run import Job, Traced, declared, run
from pipeline.planning.trace.session import HEAD, INPUT, LOSS, START
from pipeline.planning.trace.structure import Structure, kinds, prefix, structure
from pipeline.planning.watch import Extent

SAMPLES = 1, 2
"""Sizes of micro-batches that are run; every other lies on the line through them."""

Pieces = dict[tuple[str, Any], list[Stretch]]
"""Phase and part of the model -> its stretches: from its beginning, and from each gradient."""


def profile(job: Job) -> Profile:
    """What the model's parts take. Raises StageError for a model that needs values."""
    whole = _whole(job)
    numbers = kinds(whole.signatures)
    # The last block that runs stands for none.
    found = _runs(job, whole, prefix(numbers) + 1)
    parts = _Parts(found, whole, numbers)
    shape = _shape(found[0].traced, whole, numbers, parts.late)
    places = [numbers.index(kind) for kind in range(len(shape.kinds))]
    return Profile(
        model=shape,
        length=job.samples.length,
        start=parts.part(FORWARD, START),
        blocks=tuple(parts.part(FORWARD, place) for place in places),
        head=parts.part(FORWARD, HEAD),
        loss=parts.part(FORWARD, LOSS),
        loss_back=parts.part(BACKWARD, START),
        head_back=parts.part(BACKWARD, HEAD),
        blocks_back=tuple(parts.part(BACKWARD, place) for place in places),
        start_back=parts.part(BACKWARD, INPUT),
        recomputed=tuple(parts.repeats(place) for place in places),
    )


_known: dict[str, Structure] = {}


def _whole(job: Job) -> Structure:
    """The structure of the whole model, built once for all recipes that declare the same."""
    if job.model is None or job.model not in _known:
        found = structure(declared(job))
        if job.model is None:
            return found
        _known[job.model] = found
    return _known[job.model]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One micro-batch of so many samples."""

    traced: Traced
    pieces: Pieces
    names: Mapping[str, str]


def _runs(job: Job, whole: Structure, blocks: int) -> list[_Run]:
    """The first so many blocks, or all where those of a shallower model are others."""
    extents: list[int | None] = [blocks, None] if blocks < len(whole.blocks) else [None]
    for depth in extents:
        found = []
        for samples in SAMPLES:
            meter = Recorder()
            extent = Extent(blocks=depth, samples=samples)
            with offloading(meter, job.topology.device):
                traced = run(job, extent=extent, meter=meter, bare=True)
            built = traced.built
            if depth is not None and [*built.signatures] != [*whole.signatures[: len(built.names)]]:
                break
            assert traced.bare is not None
            pieces = _pieces(meter.stretches, traced.bare)
            found.append(_Run(traced=traced, pieces=pieces, names=traced.bare))
        else:
            return found
    raise StageError("the model's blocks cannot be told apart")


def _pieces(stretches: Sequence[Stretch], names: Mapping[str, str]) -> Pieces:
    found: Pieces = {}
    part: Any = START
    for stretch in stretches:
        phase, visit, mark = stretch.moment
        if phase not in (FORWARD, BACKWARD) or visit:
            continue
        part = part if isinstance(mark, str) and mark in names else mark
        found.setdefault((phase, part), []).append(stretch)
    return found


class _Parts:
    """The parts of runs of two sizes."""

    def __init__(self, runs: Sequence[_Run], whole: Structure, numbers: Sequence[int]) -> None:
        self._runs = runs
        self._elements = {weight.name: weight.elements for weight in whole.weights}
        root = {weight.name for weight in whole.root}
        early = runs[0].pieces.get((BACKWARD, HEAD), []) + runs[0].pieces.get((BACKWARD, START), [])
        found = (runs[0].names.get(str(one.moment[2])) for one in early)
        self.late = tuple(dict.fromkeys(name for name in found if name in root and name))

    def repeats(self, place: int) -> bool:
        """Whether a block is computed again in backward."""
        return any(one.repeats for one in self._runs[0].pieces.get((BACKWARD, place), ()))

    def part(self, phase: str, where: Any) -> Part:
        """What it took, as functions of samples."""
        first, second = (run.pieces.get((phase, where), []) for run in self._runs)
        if not first or len(first) != len(second):
            return NOTHING
        base = first[0].levels[0], second[0].levels[0]

        def line(amounts: tuple[float, float]) -> Line:
            return Line.through((SAMPLES[0], amounts[0]), (SAMPLES[1], amounts[1]))

        def total(field: str) -> Line:
            return line((_sum(first, field), _sum(second, field)))

        peaks: list[Peak] = []
        arrived = 0
        for one, other in zip(first, second, strict=True):
            newest = self._newest(one)
            arrived += newest
            levels = _aligned(one.levels, other.levels)
            lines = [line((low[0] - base[0][0], high[0] - base[1][0])) for low, high in levels]
            peaks.append(Peak(lines[0], arrived, newest))
            peaks += [Peak(each, arrived) for each in lines]
        end = first[-1].levels[-1], second[-1].levels[-1]
        return Part(
            kept=line((end[0][0] - base[0][0], end[1][0] - base[1][0])),
            offloaded=line((end[0][1] - base[0][1], end[1][1] - base[1][1])),
            peaks=fullest(peaks),
            products=total("products"),
            attention=total("attention"),
            again=total("again"),
            made=total("made"),
        )

    def _newest(self, stretch: Stretch) -> int:
        """Elements of the weight whose gradient begins a stretch."""
        name = self._runs[0].names.get(str(stretch.moment[2]))
        return self._elements.get(name, 0) if name else 0


def _sum(stretches: Sequence[Stretch], field: str) -> float:
    return float(sum(getattr(one, field) for one in stretches))


def _aligned(
    first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Levels of two sizes that belong to each other: one by one, or, where a size took another
    way, the highest."""
    if len(first) == len(second):
        return [*zip(first, second, strict=True)]
    return [(first[0], second[0]), (max(first), max(second)), (first[-1], second[-1])]


def _shape(
    traced: Traced, whole: Structure, numbers: Sequence[int], late: Sequence[str]
) -> ModelShape:
    source, built = traced.source, traced.built
    exported = built if source.exported is source else structure(source.exported)
    root = sum(weight.elements for weight in exported.root)
    first = [numbers.index(kind) for kind in sorted(set(numbers))]
    blocks = [sum(weight.elements for weight in exported.blocks[place]) for place in first]
    known = {weight.name for weight in exported.weights}
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
