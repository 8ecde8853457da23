"""The project's checkpoint, written by its own writers, as two ranks of a strategy save it.

The snapshot that a writer copies from is computed while it is copied, so a state of any size needs
a few MiB.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import values
from apart.child import Job, Place, Work

from exporters.trained import HOLDERS, KINDS, MOMENTS, STEP, Trained, trained
from pipeline.artifacts import Progress
from pipeline.state.checkpoints import sums_name
from pipeline.state.manifest import Group, Piece, State, TensorEntry
from pipeline.state.planning import Layout, Sharded
from pipeline.state.retention import Retention
from pipeline.state.spans import Span, share_writing
from pipeline.state.store import step_name
from pipeline.state.writer import Job as Save
from pipeline.state.writer import Setup, Skeleton, carry_out

ITEM = 4
"""Bytes of an element: everything is fp32."""


def write(job: Job, place: Place) -> Work:
    """Write `folder`/step-N as `job["ranks"]` ranks of `job["strategy"]` would."""

    def work() -> Any:
        model, root = trained(job["config"]), Path(job["folder"])
        tensors, layouts = lay_out(model, job["strategy"], job["ranks"])
        skeleton = _skeleton(tensors, layouts)
        for rank in reversed(range(job["ranks"])):  # that of rank 0 waits for the others
            setup = Setup(
                store=str(root), rank=rank, size=layouts[rank].size, files=layouts[rank].files,
                writes=layouts[rank].writes, sums=sums_name(rank),
                skeleton=None if rank else skeleton,
            )  # fmt: skip
            snapshot: Any = _Snapshot(layouts[rank])
            save = Save(name=step_name(STEP), identity="benchmark", facts=_facts(job, model))
            outcome = carry_out(setup, save, snapshot)
            if outcome.problem:
                raise RuntimeError(outcome.problem)
        return {"needed": list(_needed(root / step_name(STEP), layouts))}

    return work


def lay_out(
    model: Trained, strategy: str, ranks: int
) -> tuple[dict[str, TensorEntry], list[Layout]]:
    """All tensors, and what each rank writes: what `planning.make_plan` agrees on."""
    held = [
        [
            Span(f"{kind}/{name}", start, stop)
            for name, start, stop in HOLDERS[strategy](model, rank, ranks)
            for kind in KINDS
        ]
        for rank in range(ranks)
    ]
    tensors: dict[str, TensorEntry] = {}
    for span in (span for rank in held for span in rank):
        shape = model.shapes[span.key.partition("/")[2]]
        tensors.setdefault(span.key, TensorEntry(key=span.key, dtype="F32", shape=shape))
    shares = share_writing(held)
    return tensors, [Sharded().lay_out(rank, shares[rank], tensors) for rank in range(ranks)]


def _skeleton(tensors: dict[str, TensorEntry], layouts: list[Layout]) -> Skeleton:
    files = [file for layout in layouts for file in layout.described]
    numbers = {file.name: number for number, file in enumerate(files)}
    places = {key: number for number, key in enumerate(tensors)}
    return Skeleton(
        tensors=list(tensors.values()),
        files=files,
        sums=[sums_name(rank) for rank in range(len(layouts))],
        pieces=[
            [
                Piece(places[key], numbers[file], offset, start, stop)
                for (key, start, stop), file, offset in layout.pieces
            ]
            for layout in layouts
        ],
        retention=Retention(),
    )


def _facts(job: Job, model: Trained) -> dict[str, Any]:
    groups = zip(model.settings(), model.groups, strict=True)
    state = State(
        aliases=dict(model.aliases),
        frozen=[],
        groups=[Group(settings=settings, parameters=list(names)) for settings, names in groups],
        updates=dict.fromkeys(model.shapes, STEP),
        moments=list(MOMENTS),
        loss_scale=None,
    )
    return {
        "step": STEP, "world_size": job["ranks"], "writer": {}, "state": state,
        "progress": vars(Progress(step=STEP)),
    }  # fmt: skip


def _needed(folder: Path, layouts: list[Layout]) -> Iterator[tuple[str, int, int]]:
    """File and bytes [begin, end) of all weights."""
    for layout in layouts:
        for span, file, offset in layout.pieces:
            if span.key.startswith("weight/"):
                yield str(folder / file), offset, offset + (span.stop - span.start) * ITEM


class _Snapshot:
    """Stands in for the memory that a rank's writer writes from."""

    def __init__(self, layout: Layout) -> None:
        self._starts = [write.start for write in layout.writes]
        spans, heads = iter(layout.pieces), dict(layout.heads)
        self._content = [
            next(spans)[0] if write.piece else heads[write.start] for write in layout.writes
        ]

    def __getitem__(self, part: slice) -> memoryview:
        """A part that lies within one of the writes."""
        number = bisect.bisect_right(self._starts, part.start) - 1
        begin, end = (edge - self._starts[number] for edge in (part.start, part.stop))
        content = self._content[number]
        if isinstance(content, bytes):
            return memoryview(content)[begin:end]
        first = content.start
        return values.array(content.key, first + begin // ITEM, first + end // ITEM).data.cast("B")
