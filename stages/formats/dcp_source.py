"""A checkpoint of torch.distributed.checkpoint, read as a state."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from pipeline.engine import WEIGHT
from pipeline.errors import CheckpointError
from pipeline.state.formats import Reading
from pipeline.state.manifest import State
from pipeline.state.source import StateSource
from stages.formats.adam import fresh_progress, require_moments
from stages.formats.dcp_boxes import Boxes
from stages.formats.dcp_chunks import Spot, map_bytes
from stages.formats.dcp_index import Item, Path_, StoredTensor, read_items, writers
from stages.formats.dcp_optimizer import ROOT, DcpOptimizer
from stages.formats.mapped import entry_of

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
        self.state = State(
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
