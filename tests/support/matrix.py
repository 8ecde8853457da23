"""Checkpoints of every strategy and world size, saved once a session and read by many tests.

Workers of pytest-xdist share the folder: the first that needs a world size saves its checkpoints
under a lock.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.optimizer import GroupSettings, Lion
from stages.optimizer.adamw import AdamW
from tests.support.processes import GROUP_LIMIT, in_turn, run_ranks
from tests.support.runs import context
from tests.support.state import ADAMW, WRAPS, Setting, checkpoint_stage, digest, make_engine, train
from tests.support.strategies import STRATEGIES
from tests.support.tier import FULL, spread

HALF, WHOLE = 2, 3
"""Steps before the checkpoint, and of the whole training."""
GROUPS = (
    GroupSettings(match=("*.embed_tokens.*",), lr_ratio=0.5, weight_decay=0.0),
    GroupSettings(match=("*.q_proj.*", "*.norm.*"), lr_ratio=4.0),
)
LION = Lion(lr=1e-4, max_grad_norm=0.5, groups=GROUPS)
OPTIMIZERS: dict[str, Any] = {
    "adamw": ADAMW,
    "lion": LION,
    "groups": replace(ADAMW, groups=GROUPS),
    "bf16": AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5, moments="bf16", kernel="single"),
}
MORE = [
    ("ddp", 1), ("fsdp full", 1), ("zero3", 3), ("fsdp offload", 3), ("ddp", 4), ("zero3 tensor", 4)
]  # fmt: skip
if FULL:
    MORE += [("zero2", 1), ("zero3", 1), ("fsdp full", 3), ("zero1", 3), ("ddp", 3), ("zero2", 3)]
"""Strategies on another number of ranks than two or their group, so that every number occurs."""
OTHERS = {
    "lion": [("ddp", 2), ("zero3", 3), ("fsdp full", 1), ("zero1", 2)],
    "groups": [("fsdp full", 2), ("zero2", 2), ("zero3 sub-groups", 3), ("zero2 offload", 2)],
    "bf16": [("zero2", 2), ("fsdp full", 3), ("ddp", 2)],
}
"""Optimizer -> strategies and ranks."""


class Case:
    """A strategy on so many ranks, with an optimizer."""

    def __init__(self, wrap: str, ranks: int, optimizer: str) -> None:
        self.name = f"{wrap} on {ranks}, {optimizer}"
        self.ranks, self.optimizer = ranks, optimizer
        keep = {"keep": None}
        self.setting = Setting(wrap=wrap, optimizer=OPTIMIZERS[optimizer], checkpoint=keep)


_ADAMW = [(wrap, max(STRATEGIES[wrap].group, 2)) for wrap in WRAPS] + MORE
_ALL = {
    "adamw": [(wrap, ranks) for wrap, ranks in _ADAMW if wrap in WRAPS],
    **{name: OTHERS[name] for name in spread(list(OTHERS), 2)},
}
CASES = {
    case.name: case
    for optimizer, places in _ALL.items()
    for case in (Case(wrap, ranks, optimizer) for wrap, ranks in places)
}


def sources(target: str) -> list[str]:
    """The cases from whose checkpoints a case goes on: itself first, then others with the same
    optimizer, all of them in the full tier; each case is a source of as many."""
    own = CASES[target]
    names = [case.name for case in CASES.values() if case.optimizer == own.optimizer]
    at = names.index(target)
    others = names[at + 1 :] + names[:at]
    return [target, *(others if FULL else others[1::7][:2])]


class Matrix:
    """Checkpoints under `root`, by case: the middle of each training."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._told: dict[str, dict[int, Any]] = {"saved": {}, "loaded": {}}

    def saved(self, name: str) -> dict[str, Any]:
        """The states of a case in the middle, where it is saved, and at the end, and the losses
        between them."""
        return self._of("saved", CASES[name].ranks)[name]

    def loaded(self, name: str) -> dict[str, Any]:
        """By source: the state and the progress that a case has restored; from its own source also
        the losses after it and the state at the end."""
        for source in sources(name):
            self.saved(source)
        for other in of_ranks(CASES[name].ranks):
            for source in sources(other):
                self.saved(source)
        return self._of("loaded", CASES[name].ranks)[name]

    def checkpoint(self, name: str) -> Path:
        """The folder of a case's checkpoint."""
        self.saved(name)
        return _checkpoint(self.root, name)

    def _of(self, what: str, ranks: int) -> dict[str, Any]:
        known = self._told[what]
        if ranks not in known:
            known[ranks] = self._made(what, ranks)
        found: dict[str, Any] = known[ranks]
        return found

    def _made(self, what: str, ranks: int) -> Any:
        self.root.mkdir(parents=True, exist_ok=True)
        record = self.root / f"{what} on {ranks}.json"
        with record.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not record.exists():
                program = {"saved": save_cases, "loaded": load_cases}[what]
                names = of_ranks(ranks)
                told = run_ranks(program, ranks, str(self.root), names, limit=GROUP_LIMIT)[0]
                record.write_text(json.dumps(dict(zip(names, told, strict=True))))
            return json.loads(record.read_text())


def of_ranks(ranks: int) -> list[str]:
    """The cases on so many ranks."""
    return [case.name for case in CASES.values() if case.ranks == ranks]


def _checkpoint(root: str | Path, name: str) -> Path:
    return Path(root, name, "checkpoints", f"step-{HALF:08d}")


def save_cases(dist: DistContext, root: str, names: list[str]) -> list[dict[str, Any]]:
    """Train under each case, and save half way."""
    return in_turn(dist, [(save_case, root, name) for name in names])


def save_case(dist: DistContext, root: str, name: str) -> dict[str, Any]:
    ctx, setting = context(dist, f"{root}/{name}"), CASES[name].setting
    engine = make_engine(ctx, setting)
    checkpoints = checkpoint_stage(setting).run(ctx, engine)
    samples = 2 * engine.data_axis.count
    train(engine, 0, HALF, samples)
    checkpoints.save(Progress(step=HALF, samples=12 * HALF, tokens=100, lineage={"seed": 7}))
    half = digest(engine, dist)
    losses = train(engine, HALF, WHOLE, samples)
    checkpoints.finish()
    end = digest(engine, dist)
    checkpoints.close()
    engine.close()
    return {"half": half, "end": end, "losses": losses}


def load_cases(dist: DistContext, root: str, names: list[str]) -> list[dict[str, Any]]:
    return [load_case(dist, root, name) for name in names]


def load_case(dist: DistContext, root: str, name: str) -> dict[str, Any]:
    """Restore the checkpoints of others under a case, in one engine; train on from its own, which
    comes first."""
    setting, told = CASES[name].setting, dict[str, Any]()
    engine = make_engine(context(dist, f"{root}/{name} again"), setting)
    for source in sources(name):
        folder = Path(root, f"{name} again", source)
        if dist.is_main:
            place = _checkpoint(root, source)
            shutil.copytree(place, folder / "checkpoints" / place.name)
        dist.barrier()
        checkpoints = checkpoint_stage(setting).run(context(dist, folder), engine)
        progress = checkpoints.restore(lambda progress: None)
        told[source] = {"state": digest(engine, dist), "progress": vars(progress)}
        if source == name:
            told[source]["losses"] = train(engine, HALF, WHOLE, 2 * engine.data_axis.count)
            told[source]["end"] = digest(engine, dist)
        checkpoints.close()
    engine.close()
    return told
