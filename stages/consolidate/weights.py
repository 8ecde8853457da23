"""Weights that are read from a checkpoint, for consolidate.stream; imports torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pipeline import WEIGHT, CheckpointError, TensorSpec, Weights
from pipeline.checkpoint import DTYPES, Reading, StateSource, as_bytes, open_state
from stages.formats.stored import weights_of
from stages.weights.files import sampled


def open_weights(address: str, *, verify: bool = True, average: str | None = None) -> Weights:
    """The weights of the checkpoint at a path or address, or their `average`. `verify` compares the
    checksums of whole files, if the format has them. Raises CheckpointError, UsageError."""
    source = open_state(address, Reading(weights_only=True, verify=verify))
    if average is not None and average not in source.state.averages:
        source.close()
        raise CheckpointError(
            f"{source.where} holds no {average} of the weights",
            hint="set weights: model in the consolidate slot",
        )
    # A digest of the state and of what is read of it, the same wherever it lies. Where a format has
    # no checksums, pieces of its files stand for them.
    held = source.digest() or sampled(state_files(address))
    facts = json.dumps([source.step, source.world_size, held, average or WEIGHT])
    return CheckpointWeights(source, hashlib.sha256(facts.encode()).hexdigest(), average)


class CheckpointWeights(Weights):
    """Parameters, tied ones by each name, and buffers; trained ones from the `average` if named."""

    def __init__(self, source: StateSource, identity: str, average: str | None = None) -> None:
        self.identity = identity
        self._source = source
        own = {name: entry.key for name, entry in weights_of(source).items()}
        if average is not None:
            own |= {name: f"{average}/{name}" for name in source.state.updates if name in own}
        tied = {alias: own[name] for alias, name in source.state.aliases.items()}
        self._keys = own | tied

    def names(self) -> Collection[str]:
        return self._keys.keys()

    def spec(self, name: str) -> TensorSpec:
        entry = self._source.tensors[self._key(name)]
        return TensorSpec(tuple(entry.shape), DTYPES[entry.dtype])

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        stored = self.spec(name).dtype
        for _, data in self._source.read(self._key(name), start, stop):
            self.bytes_read += len(data)
            yield torch.frombuffer(data, dtype=stored)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        if out.dtype != self.spec(name).dtype or out.device.type != "cpu":
            super().read_into(name, start, out)
            return
        memory = as_bytes(out)
        self._source.read_into(self._key(name), start, memory)
        self.bytes_read += len(memory)

    def close(self) -> None:
        self._source.close()

    def _key(self, name: str) -> str:
        if name not in self._keys:
            raise CheckpointError(f"{self._source.where}: holds no tensor {name}")
        return self._keys[name]


def state_files(address: str) -> list[Path]:
    """The files of a checkpoint in a folder, in order."""
    return sorted(path for path in Path(address).rglob("*") if path.is_file())
