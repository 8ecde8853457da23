"""Folders of torch.distributed.checkpoint, as two ranks of `fully_shard` save them.

torch's own planner and writers make them, one rank after the other. Tied weights are stored once,
which spares the tools that read them the copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import values
from apart.child import Job, Place, Work
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from exporters.trained import MOMENTS, STEP, WEIGHT, Held, Trained, fsdp, trained


def write(job: Job, place: Place) -> Work:
    """Write `folder`: `job["content"]` is `weights`, `adam` (weights and moments), or
    `safetensors`, which is weights for `consolidate_safetensors_files`."""

    def work() -> Any:
        model, folder = trained(job["config"]), Path(job["folder"])
        states = [_state(model, job["content"], rank, job["ranks"]) for rank in range(job["ranks"])]
        writer: FileSystemWriter = _OneByOne(folder)
        if job["content"] == "safetensors":
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        _save(states, writer)
        files = (file for file in folder.rglob("*") if file.is_file())
        return {"needed": [(str(file), 0, file.stat().st_size) for file in files]}

    return work


def _state(model: Trained, content: str, rank: int, ranks: int) -> dict[str, Any]:
    held = list(fsdp(model, rank, ranks))
    weights = {one.name: _Rows(model, WEIGHT, one) for one in held}
    if content == "safetensors":
        return weights
    if content == "weights":
        return {"model": weights}
    moments: dict[str, Any] = {
        f"state.{one.name}.{moment}": _Rows(model, moment, one)
        for one in held
        for moment in MOMENTS
    }
    for settings, names in zip(model.settings(), model.groups, strict=True):
        for name in names:
            moments[f"state.{name}.step"] = torch.tensor(float(STEP))
            moments |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
    return {"model": weights, "optimizer": moments}


def _save(states: Sequence[dict[str, Any]], writer: FileSystemWriter) -> None:
    """What `torch.distributed.checkpoint.save` does on all ranks."""
    writer.set_up_storage_writer(True)
    planners = [_Planner() for _ in states]
    plans = []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, plan in zip(planners, plans, strict=True)
    ]
    writer.finish(metadata, results)


class _Rows:
    """Some rows of a parameter or moment, computed when they are to be written."""

    def __init__(self, model: Trained, kind: str, held: Held) -> None:
        self._key, self._held = f"{kind}/{held.name}", held
        self._whole = torch.Size(model.shapes[held.name])
        width = math.prod(self._whole[1:])
        self._own = torch.Size([(held.stop - held.start) // width, *self._whole[1:]])
        self._offset = torch.Size([held.start // width, *(0 for _ in self._whole[1:])])

    def __create_write_items__(self, fqn: str, this: Any) -> list[WriteItem]:
        """torch's protocol for what is a part of a tensor."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, self._offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=self._offset, sizes=self._own),
                    properties=TensorProperties(dtype=torch.float32),
                    size=self._whole,
                ),
            )
        ]

    def tensor(self) -> torch.Tensor:
        """The rows."""
        data = values.array(self._key, self._held.start, self._held.stop)
        return torch.from_numpy(data).view(self._own)


class _Planner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.tensor() if isinstance(found, _Rows) else super().lookup_object(index)


class _OneByOne(FileSystemWriter):
    """Writes tensor by tensor; torch's own `write_data` keeps all that a rank has written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        written = []
        with Path(self.path, name).open("wb") as stream:
            for item in plan.items:
                begin, data = stream.tell(), planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    torch.save(data, stream)
                else:
                    stream.write(data.getbuffer())
                length = stream.tell() - begin
                written.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done
