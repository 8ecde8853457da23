"""Profile a model's parts: run each kind of block once, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipeline.chain.artifacts import Results
from pipeline.errors import StageError
from pipeline.planning import forecast
from pipeline.planning.forecast import BACKWARD, FORWARD, Line, Part, Peak, Profile
from pipeline.planning.planner import Job, TraceScope
from pipeline.planning.shapes import ModelShape, Weight
from pipeline.planning.trace import run as tracing
from pipeline.planning.trace.run import BareModel, Structure, structure
from pipeline.planning.trace.torch_compat import Link
from pipeline.planning.trace.tracker import HEAD, INPUT, LOSS, START, Stretch

SAMPLES = 1, 2
"""Sizes of micro-batches that are run; every other lies on the line through them."""
ROOT = {
    "forward embeddings": (FORWARD, START),
    "forward head": (FORWARD, HEAD),
    "loss head": (FORWARD, LOSS),
    "begin head": (BACKWARD, START),
    "backward head": (BACKWARD, HEAD),
    "backward embeddings": (BACKWARD, INPUT),
}
"""Parts outside of blocks -> phase and mark of a trace."""
UNEVEN = "experts that get more tokens than others: routing is taken to be balanced"


def profile(job: Job) -> Profile:
    """Run the parts of a job's model. Raises StageError for a model that needs values, and
    UsageError for a recipe without a model."""
    with tracing.context(job) as ctx:
        source = tracing.declare(job, Results.of(TraceScope()), ctx)  # in full depth
    whole = structure(source.skeleton)
    numbers = tracing.kinds(whole.signatures)
    first = [numbers.index(kind) for kind in sorted({*numbers})]
    # One more: no kind is measured on the last block that runs.
    parts = _Parts(_runs(job, whole, max(first, default=-1) + 2))
    where: dict[str, tuple[str, Any]] = dict(ROOT)
    for kind, place in enumerate(first):
        where |= {f"forward {kind}": (FORWARD, place), f"backward {kind}": (BACKWARD, place)}
    # A model that is trained as a whole has no adapters, which are not exported.
    bare = source.skeleton is not source or all(weight.trained for weight in whole.weights)
    plain = whole if bare else structure(source.export_view)
    return Profile(
        model=_shape(source.vocab_size, plain, parts, numbers, first),
        parts={name: parts.part(*place) for name, place in where.items()},
        recomputed=(*map(parts.repeats, first), *(False for _ in whole.towers)),
    )


def _runs(job: Job, whole: Structure, blocks: int) -> list[BareModel]:
    """Run one micro-batch of each size through the first `blocks` blocks, or through all if a
    shallower model has other blocks. Raises StageError if even all differ."""
    for depth in dict.fromkeys([min(blocks, len(whole.blocks)), None]):
        found = [tracing.run(job, TraceScope(blocks=depth, samples=size)) for size in SAMPLES]
        here = structure(found[0].source.skeleton)
        if here.root == whole.root and here.signatures == whole.signatures[: len(here.blocks)]:
            return found
    raise StageError("the model's blocks differ from one build to the next")


class _Parts:
    """The parts of a model, as functions of samples. given, early: names of the weights that get a
    gradient, and of those that get one before blocks do."""

    def __init__(self, runs: Sequence[BareModel]) -> None:
        self.bare, self.built = runs[0], runs[0].built
        self._pieces: list[dict[tuple[str, Any], list[Stretch]]] = [{} for _ in runs]
        for pieces, one in zip(self._pieces, runs, strict=True):
            for stretch in one.stretches:
                pieces.setdefault((stretch.phase, stretch.part), []).append(stretch)
        weights = map(self.bare.part, self.built.weights)
        self._elements = {weight.name: weight.elements for weight in weights}
        first = self._pieces[0]
        if any(len(first.get((FORWARD, n), ())) > 1 for n in range(len(self.built.blocks))):
            raise StageError(
                "the model runs some of its blocks more than once",
                hint="`pipe bench` measures its memory",
            )
        early = [*first.get((BACKWARD, START), ()), *first.get((BACKWARD, HEAD), ())]
        self.early = {one.given for one in early}
        self.given = {one.given for one in runs[0].stretches}

    def repeats(self, place: int) -> bool:
        """Whether a block is recomputed in backward."""
        return any(one.repeats for one in self._pieces[0].get((BACKWARD, place), ()))

    def part(self, phase: str, where: Any) -> Part:
        """Memory and work of a part; empty if it did not run."""
        two = [pieces.get((phase, where), []) for pieces in self._pieces]
        if not two[0] or len(two[0]) != len(two[1]):
            return Part()
        base, end = ([stretches[at].levels[at] for stretches in two] for at in (0, -1))
        if (phase, where) == (FORWARD, HEAD):  # begins before the last block has freed its own
            for n, stretches in enumerate(two):
                pairs = itertools.pairwise(stretches[0].levels)
                falls = itertools.takewhile(lambda pair: pair[1] <= pair[0], pairs)
                base[n] = min([base[n], *(after for _, after in falls)])

        def total(what: str | Link) -> Line:
            return _line(*(sum(one.work[what] for one in stretches) for stretches in two))

        exchanges = []
        for link in dict.fromkeys(what for one in two[1] for what in one.work):
            if isinstance(link, Link) and link.group in self.bare.groups and len(link.ranks) > 1:
                kind = forecast.Traffic(
                    collective=link.collective, bytes=0, ranks=len(link.ranks), waits=True,
                    apart=link.ranks[1] - link.ranks[0], what=self.bare.groups[link.group],
                )  # fmt: skip
                exchanges.append((kind, total(link)))
        return Part(
            kept=_line(*(e.device - b.device for e, b in zip(end, base, strict=True))),
            offloaded=_line(*(e.host - b.host for e, b in zip(end, base, strict=True))),
            peaks=forecast.fullest(self._peaks(two, [one.device for one in base])),
            **{field: total(field) for field in ("products", "attention", "again", "made")},
            exchanges=tuple(exchanges),
        )

    def _peaks(self, two: Sequence[Sequence[Stretch]], base: Sequence[int]) -> Iterator[Peak]:
        arrived = 0
        for pair in zip(*two, strict=True):
            newest = self._elements.get(pair[0].given, 0)
            arrived += newest
            levels = [[level.device for level in one.levels] for one in pair]
            if len(levels[0]) != len(levels[1]):  # beginnings, the highest, and ends
                levels = [[each[0], max(each), each[-1]] for each in levels]
            for number, (low, high) in enumerate(zip(*levels, strict=True)):
                line = _line(low - base[0], high - base[1])
                yield Peak(line, arrived, newest if number == 0 else 0)


def _line(low: float, high: float) -> Line:
    slope = (high - low) / (SAMPLES[1] - SAMPLES[0])
    return Line(low - slope * SAMPLES[0], slope)


def _shape(
    vocabulary: int, plain: Structure, parts: _Parts, numbers: Sequence[int], first: Sequence[int]
) -> ModelShape:
    """The whole model, from the built blocks of each kind and the exported weights (`plain`)."""
    built, known = parts.built, {weight.name for weight in plain.weights}
    idle = [w.name for w in built.weights if w.trained and w.name not in parts.given]

    def elements(weights: Iterable[Weight]) -> int:
        return sum(weight.elements for weight in weights)

    def shaped(weights: Sequence[Weight]) -> tuple[Weight, ...]:
        own = map(parts.bare.part, weights)
        return tuple(replace(w, trained=w.trained and w.name not in idle) for w in own)

    root = elements([*plain.root, *itertools.chain(*plain.towers)])
    blocks = [elements(plain.blocks[place]) for place in first]
    added = [
        elements(one for one in built.blocks[place] if one.trained and one.name not in known)
        for place in first
    ]
    exported = root + sum(blocks[kind] for kind in numbers)
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
        parameters=exported + sum(added[kind] for kind in numbers),
        exported=exported,
        proven=root + max(blocks, default=0),
        caveats=(
            *(f"memory of {name}, which gets no gradient here" for name in idle[:1]),
            *((UNEVEN,) if parts.bare.experts else ()),
        ),
    )
