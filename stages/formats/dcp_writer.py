"""Write a state with torch.distributed.checkpoint, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipeline.checkpoint.formats import StateSource
from pipeline.checkpoint.layout import DTYPES
from pipeline.checkpoint.offline_writer import appearing
from pipeline.contracts.engine import WEIGHT
from pipeline.errors import CheckpointError
from stages.formats.files import append
from stages.formats.mapped import MOMENTS, SETTINGS, assembled

DATA = "__0_0.distcp"
"""The first file of rank 0, as torch calls it."""


def write_dcp(source: StateSource, folder: Path) -> Sequence[str]:
    """Write `folder`; returns what to know before loading it. Raises CheckpointError for a state of
    another optimizer than Adam."""
    if source.state.moments and set(source.state.moments) != set(MOMENTS):
        raise CheckpointError(
            f"{source.where}: only weights and Adam's moments can be written, here are "
            + ", ".join(source.state.moments)
        )
    keys: dict[str, str] = {}
    model = {name: _promise(source, key, keys, f"model.{name}") for name, key in _names(source)}
    state: dict[str, Any] = {"model": model}
    if source.state.moments:
        state["optimizer"] = _optimizer(source, keys)
    with appearing(folder) as partial, _alone():
        save(
            state,
            storage_writer=_Writer(partial, overwrite=False),
            planner=_Planner(source, keys),
            no_dist=True,
        )
    notes = [
        "load it with torch.distributed.checkpoint.load into what get_model_state_dict and "
        "get_optimizer_state_dict(options=StateDictOptions(flatten_optimizer_state_dict=True)) "
        "return, as {'model': ..., 'optimizer': ...}"
    ]
    if source.state.averages:
        kinds = ", ".join(source.state.averages)
        notes.append(f"left out, as there is no place for it: {kinds} of the weights")
    return notes


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process is the intent, of which torch warns; errors are those of that process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as failed:
        for error, _ in failed.failures.values():
            raise error from None
        raise


class _Planner(DefaultSavePlanner):
    """The state dict promises tensors; each is read from the source when it is to be written."""

    def __init__(self, source: StateSource, keys: dict[str, str]) -> None:
        super().__init__()
        self._source = source
        self._keys = keys

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self._keys:
            return assembled(self._source, self._keys[index.fqn])
        return super().lookup_object(index)


class _Writer(FileSystemWriter):
    """One file, tensor by tensor; torch's own `write_data` keeps all that it has written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = []
        with Path(self.path, DATA).open("wb") as stream:
            for item in plan.items:
                offset = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, Tensor):
                    append(data, stream)
                else:
                    stream.write(data.getbuffer())
                length = stream.tell() - offset
                place = _StorageInfo(DATA, offset, length)
                written.append(WriteResult(item.index, length, place))
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done


def _names(source: StateSource) -> list[tuple[str, str]]:
    """Every name of a model's state dict, tied ones too, and the key of its tensor."""
    own = {
        key.removeprefix(f"{WEIGHT}/"): key
        for key in source.tensors
        if key.startswith(f"{WEIGHT}/")
    }
    return [*own.items(), *((alias, own[name]) for alias, name in source.state.aliases.items())]


def _promise(source: StateSource, key: str, keys: dict[str, str], name: str) -> Tensor:
    """A tensor without memory; `keys` notes what will be in it."""
    keys[name] = key
    entry = source.entry(key)
    return torch.empty(tuple(entry.shape), dtype=DTYPES[entry.dtype], device="meta")


def _optimizer(source: StateSource, keys: dict[str, str]) -> dict[str, Any]:
    """As `get_optimizer_state_dict` flattens it."""
    found: dict[str, Any] = {}
    for name, count in source.state.updates.items():
        found[f"state.{name}.step"] = torch.tensor(float(count))
        for moment in MOMENTS:
            key = f"state.{name}.{moment}"
            found[key] = _promise(source, f"{moment}/{name}", keys, f"optimizer.{key}")
    for group in source.state.groups:
        settings = _all_settings(group.settings, source.where)
        for name in group.parameters:
            found |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
    return found


def _all_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A group as torch's AdamW has it; loading asks for every one of its keys."""
    if set(settings) != set(SETTINGS):
        raise CheckpointError(
            f"{where}: the optimizer has the settings {', '.join(sorted(settings))}; only AdamW's "
            f"{', '.join(SETTINGS)} can be converted"
        )
    known = {**settings, "betas": tuple(settings["betas"])}
    group = dict(torch.optim.AdamW([torch.zeros(1)], **known).param_groups[0])
    del group["params"]
    return {**group, "initial_lr": group["lr"]}
