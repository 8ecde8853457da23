"""Programs of each rank in the tests of checkpoints: an engine under any strategy, and digests of
its whole training state that do not depend on the strategy."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed

from pipeline.contracts.engine import Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import LossScaling, OptimizerPlan, Precision
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import FullCheckpoint, ShardedCheckpoint
from stages.optimizer.adamw import AdamW
from stages.wrap.zero import OptimizerOffload, Zero
from tests.support.batches import accumulated
from tests.support.runs import context, tiny_model
from tests.support.strategies import having
from tests.support.zero import share

WRAPS: dict[str, Any] = {name: one.stage() for name, one in having("resumes").items()}
ADAMW = AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One engine and its training, as plain data that travels to the ranks."""

    wrap: str
    compute: str = "fp32"
    master: str = "fp32"
    loss_scaling: LossScaling | None = None
    frozen: str = "layers.1."
    model: dict[str, Any] = field(default_factory=dict)
    nvme: str = ""
    empty: bool = False
    full: bool = False
    checkpoint: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = ADAMW


def source(ctx: Any, setting: Setting) -> ModelSource:
    return tiny_model(ctx, setting.model, setting.frozen, empty=setting.empty)


def make_engine(ctx: Any, setting: Setting, plan: OptimizerPlan | None = None) -> Engine:
    """Return the model under the setting's strategy, with two optimizer groups."""
    precision = Precision(
        master=setting.master, compute=setting.compute, reduce="fp32", buffer=None,  # type: ignore[arg-type]
        loss_scaling=setting.loss_scaling,
    )  # fmt: skip
    plan = plan or setting.optimizer.run(ctx)
    wrap = nvme_wrap(setting.nvme) if setting.wrap == "zero3 nvme" else WRAPS[setting.wrap]
    return wrap.run(ctx, source(ctx, setting), precision, plan)


def checkpoint_stage(setting: Setting) -> Any:
    """Return the stage that saves whole tensors, or each rank's own part."""
    return (FullCheckpoint if setting.full else ShardedCheckpoint)(**setting.checkpoint)


def nvme_wrap(path: str) -> Zero:
    """Return ZeRO-3 with optimizer state on disk; needs sub-groups of at least one block."""
    return Zero(
        stage=3,
        offload_optimizer=OptimizerOffload(
            device="nvme", path=path, pin_memory=False, buffer_count=4
        ),
    )


def train(
    engine: Engine, first: int, last: int, samples: int = 12, *, parts: int = 1
) -> list[float]:
    """Run optimizer steps `first` ... `last` - 1 with other rates for each part of the optimizer;
    return the mean losses."""
    losses = []
    for step in range(first, last):
        batches, targets = share(engine, step, samples)
        total = engine.total(accumulated(engine, batches, targets))
        engine.step(lr_scales=[(1 - 0.05 * step) ** (part + 1) for part in range(parts)])
        losses.append(float(total) / targets)
    return losses


def digest(engine: Engine, dist: DistContext) -> dict[str, str]:
    """Return digests of every logical tensor and of everything else, gathered without a
    checkpoint."""
    own = [
        [f"{kind}/{part.name}", part.start, part.stride, part.count, tensor.itemsize, _text(tensor)]
        for part in engine.fragments()
        for kind, tensor in part.state.items()
    ]
    whole: dict[str, dict[int, bytes]] = {}
    for rank in dist.gather(own):
        for key, start, stride, count, size, text in rank:
            data = base64.b64decode(text)
            run = len(data) // count
            for row in range(count):
                values = data[row * run : (row + 1) * run]
                at = (start + row * stride) * size
                known = whole.setdefault(key, {}).setdefault(at, values)
                assert known == values, f"{key} differs"
    state = engine.state()
    digests = {key: _digest(runs) for key, runs in whole.items()}
    groups = [(sorted(group.settings.items()), sorted(group.parameters)) for group in state.groups]
    rest = {
        "groups": sorted(map(str, groups)),
        "updates": sorted(state.updates.items()),
        "loss_scale": state.loss_scale,
        "frozen": sorted(state.frozen),
        "aliases": dict(state.aliases),
    }
    return digests | {key: str(value) for key, value in rest.items()}


def _text(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.cpu().view(torch.uint8).numpy().tobytes()).decode()


def hashed(tensor: torch.Tensor) -> str:
    """Return a whole tensor's digest, as in `digest`."""
    return _digest({0: base64.b64decode(_text(tensor))})


def _digest(runs: dict[int, bytes]) -> str:
    """Return the digest of runs of bytes, by the place of the first; those that replicas hold are
    there once."""
    return hashlib.sha256(b"".join(run for _, run in sorted(runs.items()))).hexdigest()


def relay_run(dist: DistContext, folder: str, setting: Setting) -> dict[str, Any]:
    """Restore, train on, save; return the states before and after, and the progress."""
    ctx = context(dist, folder)
    engine = make_engine(ctx, setting)
    checkpoints = checkpoint_stage(setting).run(ctx, engine)
    progress = checkpoints.restore(lambda progress: None) or Progress()
    before = digest(engine, dist)
    train(engine, progress.step, progress.step + 2)
    progress = Progress(step=progress.step + 2, samples=progress.samples + 24, tokens=100)
    checkpoints.save(progress)
    checkpoints.finish()
    after = digest(engine, dist)
    checkpoints.close()
    engine.close()
    return {"before": before, "after": after, "progress": vars(progress)}


def save_run(dist: DistContext, folder: str, setting: Setting, steps: int = 3) -> dict[str, str]:
    ctx = context(dist, folder)
    engine = make_engine(ctx, setting)
    checkpoints = checkpoint_stage(setting).run(ctx, engine)
    train(engine, 0, steps)
    progress = Progress(step=steps, samples=12 * steps, tokens=100, lineage={"seed": 7})
    checkpoints.save(progress)
    checkpoints.finish()
    told = digest(engine, dist)
    checkpoints.close()
    engine.close()
    return told


def load_run(dist: DistContext, folder: str, setting: Setting, *accept: str) -> dict[str, Any]:
    """Restore into a fresh engine; return the state and the progress."""
    ctx = replace(context(dist, folder), accept=frozenset(accept))
    engine = make_engine(ctx, setting)
    checkpoints = checkpoint_stage(setting).run(ctx, engine)
    progress = checkpoints.restore(lambda progress: None)
    told = digest(engine, dist)
    checkpoints.close()
    engine.close()
    return {"state": told, "progress": None if progress is None else vars(progress)}
