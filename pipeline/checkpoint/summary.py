"""What is in a checkpoint, and which checkpoints there are. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.checkpoint import location
from pipeline.checkpoint.manifest import FILE, Damaged, Manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.retention import heldout_loss
from pipeline.checkpoint.store import Store, locate, open_store, step_number
from pipeline.errors import CheckpointError, UsageError, system_errors_as

HINT = (
    "give the folder of a checkpoint, the folder that holds them, or a run; "
    "pipe convert reads other formats"
)


class Place(NamedTuple):
    """A store, and the checkpoint in it that is meant; empty for the newest."""

    store: Store
    name: str


def find(address: str, recipe: str) -> Place:
    """Where the checkpoint is that a person means by a checkpoint's folder or address, by a folder
    of checkpoints, or by a run's folder, which holds a file `recipe`. Raises UsageError."""
    with system_errors_as(UsageError):
        return _find(address, recipe)


def _find(address: str, recipe: str) -> Place:
    local = "://" not in address
    if local and not Path(address).is_dir():
        raise UsageError(f"{address} is not there", hint=HINT)
    if local and (Path(address) / recipe).is_file():
        address = location.known(Path(address)) or location.default(Path(address))
    store, name = locate(address)
    if step_number(name) is not None or store.size(name, FILE) is not None:
        return Place(store, name)
    store = open_store(address)
    if not store.names():
        damaged = f"; damaged ones are at {', '.join(store.aside())}" if store.aside() else ""
        raise UsageError(f"{address} holds no checkpoint{damaged}", hint=HINT)
    return Place(store, "")


def overview(store: Store) -> list[dict[str, Any]]:
    """A line for each checkpoint of a store, oldest first; `damage` is what can be told without
    reading the data."""
    return [_line(store, name) for name in store.names()]


def describe(reader: CheckpointReader) -> dict[str, Any]:
    """Everything that the manifest tells, as JSON."""
    manifest = reader.manifest
    scale = manifest.state.loss_scale
    return {
        "where": reader.where,
        "step": manifest.step,
        "written": manifest.written,
        "world_size": manifest.world_size,
        "writer": dict(manifest.writer),
        "progress": dict(manifest.progress),
        "tensors": _kinds(manifest),
        "groups": [
            {"settings": dict(group.settings), "parameters": list(group.parameters)}
            for group in manifest.state.groups
        ],
        "moments": list(manifest.state.moments),
        "frozen": list(manifest.state.frozen),
        "aliases": dict(manifest.state.aliases),
        "loss_scale": None if scale is None else scale.model_dump(),
        "files": [{"name": file.name, "bytes": file.size} for file in manifest.files],
        "bytes": sum(file.size for file in manifest.files),
    }


def data_bytes(reader: CheckpointReader) -> int:
    """Bytes of all tensors, which is what a verification reads."""
    return sum(tensor.numel * tensor.itemsize for tensor in reader.tensors.values())


def _line(store: Store, name: str) -> dict[str, Any]:
    line: dict[str, Any] = dict.fromkeys(("written", "bytes", "eval_loss", "damage"))
    line = {"name": name, **line}
    try:
        reader = CheckpointReader(store, name)
        line["written"] = reader.manifest.written
        line["bytes"] = sum(file.size for file in reader.manifest.files)
        line["eval_loss"] = heldout_loss(reader.manifest)
        reader.require_files()
    except Damaged as error:
        line["damage"] = str(error)
    except CheckpointError as error:
        line["damage"] = f"not readable: {error}"
    return line


def _kinds(manifest: Manifest) -> list[dict[str, Any]]:
    """Tensors by the first part of their keys, in the order of the manifest."""
    found: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": []}
    )
    for tensor in manifest.tensors:
        kind = found[tensor.key.partition("/")[0]]
        kind["tensors"] += 1
        kind["elements"] += tensor.numel
        kind["bytes"] += tensor.numel * tensor.itemsize
        if tensor.dtype not in kind["dtypes"]:
            kind["dtypes"].append(tensor.dtype)
    return [{"kind": name, **facts} for name, facts in found.items()]
