"""Full tensors out of checkpoints of any format. Importing it imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipeline import (
    WEIGHT,
    CheckpointError,
    Checkpoints,
    Context,
    Engine,
    PlanView,
    Problem,
    TensorSpec,
    TrainedRun,
    Weights,
    traits,
)
from pipeline.checkpoint import Formats, StateSource
from stages.average.ema import EmaAverage

if TYPE_CHECKING:
    from torch import Tensor


def average_problems(weights: str, train: Any, plan: PlanView) -> Iterator[Problem]:
    """Yield a mistake where the average of `weights: ema` is not kept by a training."""
    engines = [*plan.producers(train, Engine)]
    kept = any(isinstance(engine, EmaAverage) for engine in engines)
    if weights == "ema" and engines and not kept:
        yield Problem(
            key="weights",
            message="this recipe's training keeps no average",
            hint="add a slot average.ema between wrap and checkpoint",
        )


@dataclass(frozen=True, kw_only=True)
class ConsolidateStream:
    """Stream full tensors out of a checkpoint of any strategy, number of processes and format:
    canonical, full, DeepSpeed's, torch.distributed.checkpoint's.

    Any range of any tensor is put together from the parts that ranks saved, while it is read;
    memory stays at a few MiB whatever the model's size. Master weights are read where there are
    any. In canonical checkpoints every byte is verified.
    """

    nothing_to_plan: ClassVar[bool] = True

    weights: Literal["model", "ema"] = "model"
    """The trained weights, or their exponential moving average, where the training kept one (slot
    `average.ema`). Frozen weights are the same in both."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        train = plan.producer(self, TrainedRun)
        yield from average_problems(self.weights, train, plan)
        stage = plan.producer(train, Checkpoints)
        if stage is not None:
            saved = stage.format if isinstance(stage, traits.NamesFormat) else None
            if saved not in Formats.installed().names():
                what = f"there is no format `{saved}`" if saved else "the stage names no `format`"
                yield Problem(
                    message=f"{type(stage).__name__}'s checkpoints cannot be read: {what}",
                    hint="docs/writing-a-stage.md says how a checkpoint stage names one",
                )

    def run(self, ctx: Context, trained: TrainedRun) -> Weights:
        average = None if self.weights == "model" else self.weights
        return open_weights(trained.checkpoint, verify=ctx.dist.is_main, average=average)

    run_dry = run


def open_weights(address: str, *, verify: bool = True, average: str | None = None) -> Weights:
    """The weights of the checkpoint at a path or address, or their `average`. `verify` compares the
    checksums of whole files, if the format has them. Raises CheckpointError, UsageError."""
    from pipeline.checkpoint import Reading, open_state
    from stages.weights.files import sampled

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
        from stages.formats.stored import weights_of

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
        from pipeline.checkpoint import DTYPES

        entry = self._source.tensors[self._key(name)]
        return TensorSpec(tuple(entry.shape), DTYPES[entry.dtype])

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        import torch

        stored = self.spec(name).dtype
        for _, data in self._source.read(self._key(name), start, stop):
            self.bytes_read += len(data)
            yield torch.frombuffer(data, dtype=stored)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        from pipeline.checkpoint import as_bytes

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
