"""Programs of each rank in the tests of averaged weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pipeline.contracts.data import MicroBatch
from pipeline.contracts.engine import WEIGHT, Engine
from pipeline.contracts.training import Progress, TrainedRun
from pipeline.distributed.process_group import DistContext
from stages.average.ema import EmaAverage
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.consolidate.stream import ConsolidateStream
from tests.support.batches import evaluated, micro_batch
from tests.support.runs import context
from tests.support.state import Setting, digest, hashed, make_engine, train

DECAY, FIRST, LAST = 0.75, 3, 5


def averaged(engine: Engine) -> list[torch.Tensor]:
    return [part.state["ema"].clone() for part in engine.fragments() if "ema" in part.state]


def trained(engine: Engine) -> list[torch.Tensor]:
    return [part.state[WEIGHT].clone() for part in engine.fragments() if "ema" in part.state]


def furthest_from_plain(engine: Engine, first: int, last: int) -> float:
    """Train; return the largest difference from averages computed in fp64 from the weights."""
    plain = [tensor.double() for tensor in averaged(engine)]
    for step in range(first, last):
        train(engine, step, step + 1)
        weights = trained(engine)
        plain = [DECAY * a + (1 - DECAY) * w.double() for a, w in zip(plain, weights, strict=True)]
    both = zip(plain, averaged(engine), strict=True)
    return max(float((a - b).abs().max()) for a, b in both)


def average_run(dist: DistContext, folder: str, setting: Setting) -> dict[str, Any]:
    """Train with an average, read it in every way, save, continue training."""
    ctx = context(dist, folder)
    inner = make_engine(ctx, setting)
    engine = EmaAverage(decay=DECAY).run(ctx, inner)
    checkpoints = ShardedCheckpoint().run(ctx, engine)
    begun = all(torch.equal(a, w) for a, w in zip(averaged(engine), trained(engine), strict=True))
    difference = furthest_from_plain(engine, 0, FIRST)
    moved = max(
        float((a - w).abs().max()) for a, w in zip(averaged(engine), trained(engine), strict=True)
    )
    state = digest(engine, dist)
    ids = torch.arange(7)[None]
    batches = [micro_batch(ids, ids)]
    own = evaluated(inner, batches)
    put: list[bool] = []

    def observed() -> Iterator[MicroBatch]:
        both = zip(averaged(engine), trained(engine), strict=True)
        put.append(all(torch.equal(a, w) for a, w in both))
        yield from batches

    other = evaluated(engine, observed())
    again = evaluated(inner, batches)
    checkpoints.save(Progress(step=FIRST, samples=36))
    address = checkpoints.finish()
    unchanged = digest(engine, dist) == state
    train(engine, FIRST, LAST)
    after = digest(engine, dist)
    checkpoints.close()
    engine.close()
    run = TrainedRun(checkpoint=address, progress=Progress())
    exported = ConsolidateStream(weights="ema").run(ctx, run)
    frozen = [part for part in exported.names() if f"ema/{part}" not in state]
    return {
        "begun": begun,
        "difference": difference,
        "moved": moved,
        "state": state,
        "put": put == [True],
        "seen": [torch.equal(own, again), torch.equal(own, other)],
        "unchanged": unchanged,
        "after": after,
        "exported": {name: hashed(exported.read(name)) for name in exported.names()},
        "frozen": frozen,
    }


def continued_run(dist: DistContext, folder: str, setting: Setting) -> dict[str, Any]:
    """Restore, digest the state, continue training."""
    ctx = context(dist, folder)
    engine = EmaAverage(decay=DECAY).run(ctx, make_engine(ctx, setting))
    checkpoints = ShardedCheckpoint().run(ctx, engine)
    checkpoints.restore(lambda progress: None)
    state = digest(engine, dist)
    train(engine, FIRST, LAST)
    after = digest(engine, dist)
    checkpoints.close()
    engine.close()
    return {"state": state, "after": after}


def begun_run(dist: DistContext, folder: str, setting: Setting) -> bool:
    """Restore a checkpoint without an average; return whether the average begins with the
    weights."""
    ctx = context(dist, folder)
    engine = EmaAverage(decay=DECAY).run(ctx, make_engine(ctx, setting))
    train(engine, 0, 1)
    checkpoints = ShardedCheckpoint().run(ctx, engine)
    checkpoints.restore(lambda progress: None)
    weights, averages = trained(engine), averaged(engine)
    checkpoints.close()
    engine.close()
    return all(torch.equal(a, w.float()) for a, w in zip(averages, weights, strict=True))
