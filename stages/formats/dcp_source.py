"""A checkpoint of torch.distributed.checkpoint, read as a state."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.checkpoint.formats import Reading, StateSource
from pipeline.contracts.engine import WEIGHT, EngineState, ParameterGroup
from pipeline.errors import CheckpointError
from stages.formats.boxes import Boxes
from stages.formats.dcp_files import (
    Item,
    Path_,
    Spot,
    StoredTensor,
    map_bytes,
    read_items,
    value_of,
    writers,
)
from stages.formats.mapped import SETTINGS, entry_of, fresh_progress, require_moments, settings

MODEL = "model"
RECENT = 2
"""Tensors whose chunks stay mapped, as each is read in many pieces; two are compared with each
other."""


def open_dcp(folder: Path, parts: Sequence[Path], reading: Reading) -> StateSource:
    """The state in the folders `parts` of `folder`. Raises CheckpointError."""
    items: dict[Path_, Item] = {}
    for part in parts:
        items |= read_items(part)
    weights = _weights(items, folder)
    optimizer = DcpOptimizer(items, str(folder), weights_only=reading.weights_only)
    if not optimizer.moments and not reading.weights_only:
        raise CheckpointError(
            f"{folder}: holds no optimizer state", hint="--weights-only takes the weights alone"
        )
    if not reading.weights_only:
        for name, kinds in optimizer.moments.items():
            require_moments(kinds, str(folder), name)
    return DcpSource(folder, weights, optimizer, writers(items), reading)


def _weights(items: Mapping[Path_, Item], folder: Path) -> dict[str, StoredTensor]:
    """Under `model`, or where that is not, beside the optimizer."""
    nested = {
        ".".join(path[1:]): item
        for path, item in items.items()
        if path[0] == MODEL and len(path) > 1 and isinstance(item, StoredTensor)
    }
    beside = {
        path[0]: item
        for path, item in items.items()
        if len(path) == 1 and path[0] != ROOT and isinstance(item, StoredTensor)
    }
    if not nested and not beside:
        raise CheckpointError(f"{folder}: holds no weights")
    return nested or beside


class DcpSource(StateSource):
    """Tensors as boxes, each mapped while it is read and verified when it first is."""

    def __init__(
        self, folder: Path, weights: Mapping[str, StoredTensor], optimizer: DcpOptimizer,
        world_size: int, reading: Reading,
    ) -> None:  # fmt: skip
        self.where = str(folder)
        self.world_size = world_size
        self.writer = {"format": "dcp"}
        self._verified: set[Spot] = set()
        self._boxes = functools.lru_cache(RECENT)(self._opened)
        self._stored = {f"{WEIGHT}/{name}": tensor for name, tensor in weights.items()}
        trained = [name for name in optimizer.moments if name in weights]
        moments = {} if reading.weights_only else optimizer.moments
        for name, kinds in moments.items():
            if name not in weights:
                raise CheckpointError(f"{folder}: holds optimizer state of {name}, but no weight")
            self._stored |= {f"{kind}/{name}": tensor for kind, tensor in kinds.items()}
        self.tensors = {
            key: entry_of(key, stored.dtype, stored.shape, self.where)
            for key, stored in self._stored.items()
        }
        updates = optimizer.updates()
        aliases = dict(self._aliases(trained))
        for alias in aliases:
            del self._stored[f"{WEIGHT}/{alias}"], self.tensors[f"{WEIGHT}/{alias}"]
        self.state = EngineState(
            aliases=aliases,
            frozen=[name for name in weights if name not in trained and name not in aliases],
            groups=optimizer.groups(),
            updates=updates,
            moments=sorted({kind for kinds in moments.values() for kind in kinds}),
            loss_scale=None,
        )
        self.step = max(updates.values(), default=0)
        self.progress = fresh_progress(self.step, reading.samples)

    def read(self, key: str, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        self.entry(key)
        yield from self._boxes(key).read(start, stop)

    def close(self) -> None:
        self._stored.clear()
        self._boxes.cache_clear()

    def _opened(self, key: str) -> Boxes:
        stored = self._stored[key]

        def mapped(number: int) -> Tensor:
            spot = stored.spots[number]
            found = map_bytes(spot, key, verify=spot not in self._verified)
            self._verified.add(spot)
            return found

        itemsize = self.tensors[key].itemsize
        return Boxes(f"{self.where}: {key}", stored.shape, itemsize, stored.boxes, mapped)

    def _aliases(self, trained: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Matrices without optimizer state that equal a trained one: other names of tied ones."""
        for key, entry in self.tensors.items():
            kind, _, name = key.partition("/")
            if kind != WEIGHT or name in trained or len(entry.shape) < 2:
                continue
            for other in trained:
                twin = self.tensors[f"{WEIGHT}/{other}"]
                same = (twin.shape, twin.dtype) == (entry.shape, entry.dtype)
                if same and self._equal(key, twin.key, entry.numel):
                    yield name, other
                    break

    def _equal(self, one: str, other: str, numel: int) -> bool:
        both = zip(self.read(one, 0, numel), self.read(other, 0, numel), strict=False)
        return all(a == b for (_, a), (_, b) in both)


ROOT = "optimizer"
STEP = "step"
_BY_NUMBER = re.compile(r"(\d+)\.(\w+)")
_USED = (*SETTINGS, "initial_lr")


class DcpOptimizer:
    """Keys are `state.NAME.KIND`, and `param_groups.NAME.SETTING` or `param_groups.NUMBER.SETTING`,
    however they are nested. With `weights_only` it is asked for what was trained alone, and may be
    of any kind."""

    def __init__(self, items: Mapping[Path_, Item], where: str, *, weights_only: bool) -> None:
        self._where = where
        self._weights_only = weights_only
        self._groups: dict[str, Item] = {}
        self.moments: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        """Parameter -> kind -> tensor."""
        self._counts: dict[str, Item] = {}
        for path, item in items.items():
            if path[0] == ROOT:
                self._take(".".join(path[1:]), item)

    def updates(self) -> dict[str, int]:
        """Parameter -> steps applied to it."""
        found = {}
        for name in self.moments:
            if name not in self._counts:
                if self._weights_only:
                    continue
                raise CheckpointError(f"{self._where}: does not say how often {name} was updated")
            found[name] = int(value_of(self._counts[name], f"{name}.{STEP}"))
        return found

    def groups(self) -> list[ParameterGroup]:
        """Parameters with their hyperparameters; without numbers, those with equal ones."""
        if self._weights_only:
            return []
        numbered = {match: item for key, item in self._groups.items()
                    if (match := _BY_NUMBER.fullmatch(key))}  # fmt: skip
        if numbered:
            return list(self._numbered(numbered))
        return list(self._by_name())

    def _take(self, key: str, item: Item) -> None:
        if key.startswith("param_groups."):
            self._groups[key.removeprefix("param_groups.")] = item
        elif key.startswith("state."):
            name, _, kind = key.removeprefix("state.").rpartition(".")
            if kind == STEP:
                self._counts[name] = item
            elif isinstance(item, StoredTensor):
                self.moments[name][kind] = item
            elif not self._weights_only:
                raise CheckpointError(f"{self._where}: {key} is no tensor")

    def _numbered(self, items: Mapping[re.Match[str], Item]) -> Iterator[ParameterGroup]:
        found: dict[int, dict[str, Any]] = defaultdict(dict)
        for match, item in items.items():
            if match[2] in (*_USED, "params"):
                found[int(match[1])][match[2]] = value_of(item, match[0])
        for number in sorted(found):
            names = found[number].get("params")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise CheckpointError(f"{self._where}: group {number} does not name its parameters")
            yield ParameterGroup(settings=settings(found[number]), parameters=names)

    def _by_name(self) -> Iterator[ParameterGroup]:
        found: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for name in self.moments:
            keys = {setting: f"{name}.{setting}" for setting in _USED}
            own = settings(
                {s: value_of(self._groups[k], k) for s, k in keys.items() if k in self._groups}
            )
            found.setdefault(str(own), (own, []))[1].append(name)
        for own, names in found.values():
            yield ParameterGroup(settings=own, parameters=names)
