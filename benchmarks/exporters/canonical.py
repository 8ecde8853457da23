"""The project's checkpoint, written by its own writers as two ranks of a strategy save it.

The snapshot is computed while a writer copies it, so a state of any size needs a few MiB.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import values
from apart.child import Job, Place, Work

from exporters.trained import HOLDERS, KINDS, MOMENTS, STEP, Trained, trained
from pipeline.checkpoint.division import Run
from pipeline.checkpoint.file_layout import SHARDED, Layout
from pipeline.checkpoint.manifest import ManifestTemplate, TensorEntry
from pipeline.checkpoint.retention import Retention
from pipeline.checkpoint.staging import Staging, plan_staging
from pipeline.checkpoint.store import step_name
from pipeline.checkpoint.write_plan import (
    LocalShard,
    decode_division,
    divide,
    encode_shards,
    spans_of,
)
from pipeline.checkpoint.writer_main import carry_out
from pipeline.checkpoint.writer_protocol import SaveRequest as Save
from pipeline.checkpoint.writer_protocol import WriterSetup
from pipeline.contracts.engine import EngineState, ParameterGroup
from pipeline.contracts.training import Progress

ITEM = 4
"""Bytes of an element: everything is fp32."""


def write(job: Job, place: Place) -> Work:
    """Write `folder`/step-N as `job["ranks"]` ranks of `job["strategy"]` would."""

    def work() -> Any:
        model, root = trained(job["config"]), Path(job["folder"])
        tensors, runs, layouts = lay_out(model, job["strategy"], job["ranks"])
        template = ManifestTemplate(
            world_size=job["ranks"], writer={}, tensors=tensors, runs=runs,
            files=[file for layout in layouts for file in layout.described],
        )  # fmt: skip
        for rank in reversed(range(job["ranks"])):  # rank 0's writer waits for the others
            staging = plan_staging(layouts[rank], frozenset())
            setup = WriterSetup(
                store=str(root), rank=rank, world_size=job["ranks"], buffer_size=staging.size,
                files=layouts[rank].files, rounds=staging.rounds, retention=Retention(),
                template=None if rank else template,
            )  # fmt: skip
            snapshot: Any = _Snapshot(staging)
            save = Save(
                name=step_name(STEP), identity="benchmark", facts=_facts(model),
                began=time.monotonic(),
            )  # fmt: skip
            outcome = carry_out(setup, save, snapshot)
            if outcome.problem:
                raise RuntimeError(outcome.problem)
        return {"needed": list(_needed(root / step_name(STEP), layouts))}

    return work


def lay_out(
    model: Trained, strategy: str, ranks: int
) -> tuple[list[TensorEntry], list[list[Run]], list[Layout]]:
    """Return all tensors, their runs, and each rank's layout, as `plan_writes` has them."""
    made = SHARDED
    held = [
        [
            LocalShard(f"{kind}/{name}", "F32", model.shapes[name], start, stop, True)
            for name, start, stop in HOLDERS[strategy](model, rank, ranks)
            for kind in KINDS
        ]
        for rank in range(ranks)
    ]
    tensors, runs = decode_division(divide([encode_shards(own) for own in held], made))
    table = {entry.key: entry for entry in tensors}
    spans = (spans_of(rank, tensors, runs) for rank in range(ranks))
    return tensors, runs, [made.lay_out(rank, mine, table) for rank, mine in enumerate(spans)]


def _facts(model: Trained) -> dict[str, Any]:
    groups = zip(model.settings(), model.groups, strict=True)
    state = EngineState(
        aliases=dict(model.aliases),
        frozen=[],
        groups=[
            ParameterGroup(settings=settings, parameters=list(names), moments=MOMENTS)
            for settings, names in groups
        ],
        updates=dict.fromkeys(model.shapes, STEP),
        loss_scale=None,
    )
    return {"step": STEP, "state": state, "progress": vars(Progress(step=STEP))}


def _needed(folder: Path, layouts: list[Layout]) -> Iterator[tuple[str, int, int]]:
    """Yield the file and bytes [begin, end) of all weights."""
    for layout in layouts:
        for file, (offset, *_), size, span, _ in layout.items:
            if span is not None and span.key.startswith("weight/"):
                yield str(folder / layout.files[file].name), offset, offset + size


class _Snapshot:
    """Stands for the staging buffer that a rank's writer copies from."""

    def __init__(self, staging: Staging) -> None:
        content = [*staging.heads, *((copy.place, copy) for copy in staging.whole)]
        content.sort(key=lambda item: item[0])
        self._starts = [start for start, _ in content]
        self._content = [found for _, found in content]

    def __getitem__(self, part: slice) -> memoryview:
        """Return a part that lies within one of the writes."""
        number = bisect.bisect_right(self._starts, part.start) - 1
        begin, end = (edge - self._starts[number] for edge in (part.start, part.stop))
        content = self._content[number]
        if isinstance(content, bytes):
            return memoryview(content)[begin:end]
        first = content.start
        return values.array(content.key, first + begin // ITEM, first + end // ITEM).data.cast("B")
