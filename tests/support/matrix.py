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
from stages.optimizer.adamw import AdamW
from stages.optimizer.lion import Lion
from stages.optimizer.settings import GroupSettings
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import ADAMW, WRAPS, Setting, checkpoint_stage, digest, make_engine, train
from tests.support.strategies import STRATEGIES
from tests.support.tier import FULL, spread

HALF, WHOLE = 2, 4
"""Steps of the two checkpoints."""
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
    ("ddp", 1), ("fsdp full", 1), ("zero2", 1), ("zero3", 1), ("fsdp full", 3), ("zero1", 3),
    ("zero3", 3), ("fsdp offload", 3), ("ddp", 4), ("zero3 tensor", 4),
]  # fmt: skip
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
    steps = others if FULL else [*others[1::7][:2], *others[-2:-1]]
    return [target, *dict.fromkeys(steps)]


class Matrix:
    """Checkpoints under `root`, by case."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._told: dict[str, dict[int, Any]] = {"saved": {}, "loaded": {}}

    def saved(self, name: str) -> dict[str, Any]:
        """The states of a case at both checkpoints, and the losses between them."""
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

    def checkpoint(self, name: str, step: int = HALF) -> Path:
        """The folder of a checkpoint of a case."""
        self.saved(name)
        return _checkpoint(self.root, name, step)

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
                told = run_ranks(program, ranks, str(self.root), of_ranks(ranks), limit=600)[0]
                record.write_text(json.dumps(told))
            return json.loads(record.read_text())


def of_ranks(ranks: int) -> list[str]:
    """The cases on so many ranks."""
    return [case.name for case in CASES.values() if case.ranks == ranks]


def _checkpoint(root: str | Path, name: str, step: int) -> Path:
    return Path(root, name, "checkpoints", f"step-{step:08d}")


def _save(checkpoints: Any, step: int) -> None:
    lineage = {"seed": 7}
    checkpoints.save(Progress(step=step, samples=12 * step, tokens=100, lineage=lineage))
    checkpoints.finish()


def save_cases(dist: DistContext, root: str, names: list[str]) -> dict[str, Any]:
    """Train and save under each case."""
    told = {}
    for name in names:
        ctx, setting = context(dist, f"{root}/{name}"), CASES[name].setting
        engine = make_engine(ctx, setting)
        checkpoints = checkpoint_stage(setting).run(ctx, engine)
        states, losses = [], []
        for first, last in ((0, HALF), (HALF, WHOLE)):
            losses = train(engine, first, last)
            _save(checkpoints, last)
            states.append(digest(engine, dist))
        checkpoints.close()
        engine.close()
        told[name] = {"half": states[0], "end": states[1], "losses": losses}
    return told


def load_cases(dist: DistContext, root: str, names: list[str]) -> dict[str, Any]:
    """Restore the checkpoints of others under each case, in one engine; go on from its own, which
    comes first, and save again."""
    told: dict[str, dict[str, Any]] = {}
    for name in names:
        setting, found = CASES[name].setting, told.setdefault(name, {})
        engine = make_engine(context(dist, f"{root}/{name} again"), setting)
        for source in sources(name):
            folder = Path(root, f"{name} again", source)
            if dist.is_main:
                place = _checkpoint(root, source, HALF)
                shutil.copytree(place, folder / "checkpoints" / place.name)
            dist.barrier()
            ctx = context(dist, folder)
            checkpoints = checkpoint_stage(setting).run(ctx, engine)
            progress = checkpoints.restore(lambda progress: None)
            found[source] = {"state": digest(engine, dist), "progress": vars(progress)}
            if source == name:
                found[source]["losses"] = train(engine, HALF, WHOLE)
                _save(checkpoints, WHOLE)
                found[source]["end"] = digest(engine, dist)
            checkpoints.close()
        engine.close()
    return told
