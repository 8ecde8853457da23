"""Programs of each rank in the tests of checkpoints that fail while ranks train."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import ShardedCheckpoint
from tests.support.injection import SITECUSTOMIZE, VARIABLE, Fault
from tests.support.runs import context
from tests.support.state import Setting, digest, make_engine, train

FIRST, SECOND = 2, 3
"""Steps with a checkpoint after them."""


@dataclasses.dataclass(frozen=True)
class Victim:
    """The rank whose writer has a fault."""

    rank: int
    fault: Fault


def save_twice(
    dist: DistContext, folder: str, setting: Setting, victim: Victim | None = None
) -> list[dict[str, str]]:
    """Train and save twice; return the saved states."""
    if victim is not None and dist.rank == victim.rank:
        infect(folder, victim.fault)
    ctx = context(dist, folder)
    engine = make_engine(ctx, setting)
    checkpoints = ShardedCheckpoint(**setting.checkpoint).run(ctx, engine)
    states = []
    for begin, end in ((0, FIRST), (FIRST, SECOND)):
        train(engine, begin, end)
        states.append(digest(engine, dist))
        if dist.is_main:
            Path(folder, f"state-{end}.json").write_text(json.dumps(states[-1]))
        checkpoints.save(Progress(step=end, samples=12 * end, lineage={"seed": 7}))
    checkpoints.finish()
    checkpoints.close()
    engine.close()
    return states


def resume(dist: DistContext, folders: list[str], setting: Setting) -> dict[str, Any]:
    """Restore from the rank's own folder, digest the state, train a step, save."""
    ctx = context(dist, folders[dist.rank % len(folders)])
    engine = make_engine(ctx, setting)
    checkpoints = ShardedCheckpoint(**setting.checkpoint).run(ctx, engine)
    progress = checkpoints.restore(lambda progress: None)
    restored = digest(engine, dist)
    step = 0 if progress is None else progress.step
    train(engine, step, step + 1)
    checkpoints.save(Progress(step=step + 1))
    newest = checkpoints.finish()
    checkpoints.close()
    engine.close()
    return {"step": step, "state": restored, "newest": newest}


def infect(folder: str, fault: Fault) -> None:
    """Give the fault to every Python process that this process starts, if it is a writer."""
    place = Path(folder, "site")
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(SITECUSTOMIZE)
    repository = Path(__file__).parent.parent.parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(place), str(repository)])
    os.environ[VARIABLE] = json.dumps(dataclasses.asdict(fault))
