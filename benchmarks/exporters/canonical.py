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
from pipeline.checkpoint.division import Tile
from pipeline.checkpoint.file_layout import SHARDED, RankFiles, Staging, plan_staging
from pipeline.checkpoint.location import Retention
from pipeline.checkpoint.manifest import ManifestTemplate
from pipeline.checkpoint.store import step_name
from pipeline.checkpoint.write_plan import HeldTile, divide, report
from pipeline.checkpoint.writer import SaveRequest as Save
from pipeline.checkpoint.writer import WriterSetup, carry_out
from pipeline.contracts.engine import EngineState, ParameterGroup
from pipeline.contracts.training import Progress

ITEM = 4
"""Bytes of an element: everything is fp32."""


def write(job: Job, place: Place) -> Work:
    """Write `folder`/step-N as `job["ranks"]` ranks of `job["strategy"]` would."""

    def work() -> Any:
        model, root = trained(job["config"]), Path(job["folder"])
        shares, layouts = lay_out(model, job["strategy"], job["ranks"])
        files = [file for layout in layouts for file in layout.described]
        template = shares.model_copy(update={"files": files})
        for rank in reversed(range(job["ranks"])):  # rank 0's writer waits for the others
            staging = plan_staging(layouts[rank], frozenset())
            setup = WriterSetup(
                store=str(root), rank=rank, world_size=job["ranks"], buffer_size=staging.size,
                files=layouts[rank].files, shared=layouts[rank].shared,
                rounds=staging.rounds, retention=Retention(),
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


def lay_out(model: Trained, strategy: str, ranks: int) -> tuple[ManifestTemplate, list[RankFiles]]:
    """Return who writes what, and each rank's layout, as `plan_writes` has them."""
    held = [
        [
            HeldTile(f"{kind}/{name}", "F32", model.shapes[name], Tile(start, stop))
            for name, start, stop in HOLDERS[strategy](model, rank, ranks)
            for kind in KINDS
        ]
        for rank in range(ranks)
    ]
    shares = divide([report(own, []) for own in held], SHARDED, {})
    own = map(shares.division.of_rank, range(ranks))
    layouts = [SHARDED.lay_out(rank, mine, shares.tensors) for rank, mine in enumerate(own)]
    return shares, layouts


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


def _needed(folder: Path, layouts: list[RankFiles]) -> Iterator[tuple[str, int, int]]:
    """Yield the file and bytes [begin, end) of all weights."""
    for layout in layouts:
        for item in layout.items:
            if item.key.startswith("weight/"):
                yield str(folder / layout.files[item.file][0]), *item.place[:2]


class _Snapshot:
    """Stands for the staging buffer that a rank's writer copies from."""

    def __init__(self, staging: Staging) -> None:
        writes = (write for own in staging.rounds for write in own if write.key)
        content = [*staging.heads, *((write.buffer_offset, write) for write in writes)]
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
        first = content.first_element
        return values.array(content.key, first + begin // ITEM, first + end // ITEM).data.cast("B")
