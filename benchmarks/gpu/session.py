"""One setting, in a process of its own: our real stages, others' blocks between their steps."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from overhead_rank import speak_into

from gpu.opponents import OPPONENTS, Work
from gpu.saves import saves
from gpu.settings import Setting
from gpu.step_profile import Profiled
from gpu.turns import Enough, Turns, wait
from pipeline.chain.plan import plan_file
from pipeline.contracts.data import Data
from pipeline.contracts.engine import Engine
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.model import ModelSource
from pipeline.contracts.stage import Context
from pipeline.contracts.training import TrainedRun
from pipeline.distributed.process_group import environment_dist
from pipeline.execution import rundir
from stages.data.samples import TokenBlocks
from stages.train.speed import known_cost, known_peak

SAMPLES = 512


@dataclass(frozen=True, kw_only=True)
class Job:
    """A setting and its files, as data that travels to its process."""

    setting: Setting
    recipe: Path
    model: Path
    folder: Path
    length: int
    device: str


def main(job: Job) -> None:
    """Measure, and write `result.json` into the job's folder; an error is part of it."""
    speak_into(job.folder / "output.txt")
    result: dict[str, Any] = {}
    try:
        with contextlib.ExitStack() as stack:
            _measure(job, result, stack)
    except Enough:
        pass
    except BaseException as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    _keep(job, result)


def _keep(job: Job, result: Mapping[str, Any]) -> None:
    partial = job.folder / "result.part"
    partial.write_text(json.dumps(result), "utf-8")
    partial.rename(job.folder / "result.json")


def _measure(job: Job, result: dict[str, Any], stack: contextlib.ExitStack) -> None:
    """Run the recipe's chain, with samples of our own; the callback ends it, but for a setting that
    saves."""
    ctx = _context(job, stack)
    plan = plan_file(job.recipe, for_this_machine=True)
    tokens = _tokens(job)
    artifacts: dict[str, Any] = {}
    seconds = result.setdefault("slots", {})
    for step in plan.slots:
        gives = step.gives or object
        given = {name: slot and artifacts[slot] for name, slot in step.inputs.items()}
        if issubclass(gives, TrainedRun) and not job.setting.saves:
            given["callback"] = _turns(job, ctx, artifacts, tokens, result)
        began = time.perf_counter()
        if issubclass(gives, Data):
            artifacts[step.slot] = _data(job, tokens)
        else:
            artifacts[step.slot] = step.stage.run(ctx, **given)
        wait(ctx.dist.device)
        seconds[step.slot] = time.perf_counter() - began
        if issubclass(gives, Engine):
            result["engine"] = dict(artifacts[step.slot].describe())
        if issubclass(gives, TrainedRun):
            result["saves"] = saves(ctx.run_dir)


def _context(job: Job, stack: contextlib.ExitStack) -> Context:
    meeting = torch.distributed.FileStore(str(job.folder / "store"), 1)  # type: ignore[attr-defined]
    run = job.folder / "run"
    run.mkdir()
    log = logging.getLogger("pipe")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
    return Context(
        run_dir=run,
        seed=7,
        dist=environment_dist(meeting, device=job.device),
        log=log,
        metrics=Metrics(run / rundir.METRICS),
        on_exit=stack.callback,
    )


def _tokens(job: Job) -> np.ndarray[Any, Any]:
    """Random tokens, low ids far more often, so that there is something to learn."""
    vocabulary = json.loads((job.model / "config.json").read_text("utf-8"))["vocab_size"]
    uniform = np.random.default_rng(0).random(SAMPLES * job.length + 1)
    return (vocabulary * uniform**4).astype("<u4")


def _data(job: Job, tokens: np.ndarray[Any, Any]) -> Data:
    """The tokens in blocks; documents that are kept apart are an eighth of one on average."""
    apart = job.setting.fields.get("data", {}).get("documents_apart", False)
    starts = None
    if apart:
        random = np.random.default_rng(1)
        starts = np.unique(random.integers(1, len(tokens), 8 * SAMPLES))
    blocks = TokenBlocks(tokens, job.length, starts=starts)
    return Data(train=blocks, heldout=None, pad_id=0, packed=apart, identity={})


def _turns(
    job: Job,
    ctx: Context,
    artifacts: Mapping[str, Any],
    tokens: np.ndarray[Any, Any],
    result: dict[str, Any],
) -> Turns:
    setting, device = job.setting, ctx.dist.device
    work = Work(
        setting=setting, model=job.model, tokens=tokens, length=job.length, device=device,
        folder=job.folder,
    )  # fmt: skip
    engine = next(one for one in artifacts.values() if isinstance(one, Engine))
    source = [one for one in artifacts.values() if isinstance(one, ModelSource)][-1]
    result["tokens"] = setting.batch * job.length
    result |= _operations(engine, source, setting, job.length)
    return Turns(
        device=device,
        steps=setting.steps,
        rounds=setting.rounds,
        opponents=lambda: {name: OPPONENTS[name](work) for name in setting.against},
        behind=lambda: Profiled(device, result) if setting.profile else None,
        result=result,
        keep=lambda: _keep(job, result),
    )


def _operations(
    engine: Engine, source: ModelSource, setting: Setting, length: int
) -> dict[str, float]:
    """Floating-point operations of a step, as `stages.train.speed` counts them, and the device's
    peak in 16 bits, if it is known."""
    peak = known_peak(engine)
    cost = known_cost(engine, source, peak or math.inf)
    if cost is None:
        return {}
    operations = (cost.multiplied + cost.attention * length) * setting.batch * length
    return {"operations": operations, **({"peak_flops": peak} if peak else {})}
