"""Run the slots of a run on this rank: each stage in order, journalled, its artifacts dropped after
their last reader; and before: that ranks agree, that resources suffice, and the dry run."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.chain.artifacts import Results
from pipeline.contracts.data import Data
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.model import ModelSource
from pipeline.contracts.signature import needs
from pipeline.contracts.stage import (
    Context,
    Durable,
    NeedsResources,
    ResourceNeed,
    RunsDry,
    require_resources,
)
from pipeline.contracts.training import Checkpoints, Progress, TrainedRun
from pipeline.distributed.heartbeat import Phase
from pipeline.distributed.process_group import differences, in_one
from pipeline.errors import Location, StageError
from pipeline.execution.gpu_records import record_memory
from pipeline.execution.journal import Journal
from pipeline.execution.rank_logging import IN_DISPLAY
from pipeline.execution.run_spec import A_PATH, Step, is_path, without_paths
from pipeline.recipe.load import RecipeSettings
from pipeline.recipe.nodes import leaves, node_of, texts_in
from pipeline.utils.files import remove_folder
from pipeline.utils.packages import gc_as_usual, versions

Artifacts = Mapping[str, Any]
"""Artifacts by slot."""


@dataclass(eq=False)
class Runner:
    """One pass over the slots of a run. Every rank makes the same decisions: rank 0's count."""

    steps: Sequence[Step]
    ctx: Context
    journal: Journal
    dry_run: bool = False
    """Whether each training comes after a rehearsal of what follows it."""
    artifacts: dict[str, Any] = field(default_factory=dict, init=False)
    """By slot."""
    _gc_rare: bool = field(default=True, init=False)
    """As since the start of the process."""

    def run(self, todo: Collection[str], restore: Mapping[str, Mapping[str, Any]]) -> None:
        """Run the slots of `todo`, with the results of finished ones from their records (`restore`)
        as inputs. Raises whatever a stage raises; `ctx.slot` names the stage's slot. After a
        failure live artifacts stay until `close`, so that it can be reported first."""
        ctx = self.ctx
        own = json.dumps([sorted(todo), restore]) if ctx.dist.is_main else None
        todo, restore = json.loads(ctx.dist.broadcast_str(own))
        for step in self.steps:
            if step.slot in restore:
                kind: Any = step.gives
                self.artifacts[step.slot] = kind.restore(restore[step.slot])
        for number, step in enumerate(self.steps):
            ctx.slot, ctx.training = step.slot, step.training
            ctx.metrics.training = ctx.training  # also of what was made for another slot
            trains = issubclass(step.gives or object, TrainedRun)
            if step.slot in todo:
                if trains:
                    left = {later.slot for later in self.steps[number:]}
                    look_ahead(self.steps, ctx, self.artifacts, left.intersection(todo))
                    if self.dry_run:
                        run_dry(self.steps, ctx, self.artifacts)
                self._run_slot(step)
                if trains:
                    record_memory(ctx)
            self.close([slot for slot in self.artifacts if slot in step.unread])
            if trains and ctx.dist.device.type != "cpu":
                import torch

                # what the engine has left, and a further training has peaks of its own
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(ctx.dist.device)

    def _run_slot(self, step: Step) -> None:
        """Run the stage, keep what it returns, and journal it."""
        dist, facts = self.ctx.dist, {"slot": step.slot, "use": step.use}
        dist.heartbeat.beat(Phase.LOAD, step=0)
        if dist.is_main:
            self.journal.write("slot started", **facts)
        self.ctx.log.info("%s: %s", step.slot, step.use, extra=IN_DISPLAY)
        # Until the first slot that takes an input, nearly all objects are imported modules: freeze
        # them, so that no collection walks them.
        if self._gc_rare and any(step.inputs.values()):
            gc_as_usual(freeze=True)
            self._gc_rare = False
        began = time.perf_counter()
        inputs = {name: slot and self.artifacts[slot] for name, slot in step.inputs.items()}
        # a copy: a stage that keeps ctx keeps its own slot
        artifact = step.stage.run(dataclasses.replace(self.ctx), **inputs)
        if step.gives is not None and not isinstance(artifact, step.gives):
            raise StageError(
                f"{step.use} gave {type(artifact).__name__} instead of {step.gives.__name__}"
            )
        require_same_artifact(artifact, self.ctx)
        if step.gives is not None:
            self.artifacts[step.slot] = artifact
        record = artifact.record() if isinstance(artifact, Durable) else None
        dist.barrier()
        if not dist.is_main:
            return
        seconds = round(time.perf_counter() - began, 3)
        facts |= {"digest": step.digest}
        self.journal.write("slot finished", **facts, record=record, seconds=seconds)
        if record is not None:  # its files are known to be there
            dist.heartbeat.landmark()

    def close(self, slots: Sequence[str] | None = None) -> None:
        """Release the artifacts of these slots, by default of all, the newest first. Models are
        full of reference cycles; a durable artifact is an address."""
        live = False
        for slot in [*reversed(self.artifacts)] if slots is None else slots:
            artifact = self.artifacts.pop(slot)
            live = live or not isinstance(artifact, Durable)
            close = getattr(artifact, "close", None)
            if callable(close):
                close()
            del artifact, close
        if live:
            gc.collect()


def require_same_recipe(
    settings: RecipeSettings, written: Mapping[str, Any], steps: Sequence[Step], ctx: Context
) -> None:
    """Raise StageError if the ranks have other recipes or defaults of stages (collective).

    Versions of packages may differ, and absolute paths, which is logged: machines may keep files in
    different places, and what lies there is compared when it is opened. So may `launch`: how a
    machine starts. Values that depend on an environment variable, and may be secret, are compared
    by digest: in the slots as `written` in the recipe they have their names."""
    public = node_of(written, Location(file=""))
    facts: dict[str, Any] = {
        "order of slots": ", ".join(step.slot for step in steps), "name": settings.name,
        "seed": settings.seed, "dry_run": settings.dry_run,
    }  # fmt: skip
    paths: dict[str, list[str]] = {}
    for step in steps:
        facts[f"{step.slot}.use"] = step.use
        for path, value in leaves(dataclasses.asdict(step.stage), (step.slot,)):
            name, given = ".".join(map(str, path)), public.written(path)
            paths[name] = [*filter(is_path, texts_in(value))]
            facts[name] = without_paths(value)
            if "${" in json.dumps(given, default=str) and facts[name] != A_PATH:
                text = json.dumps(facts[name], sort_keys=True, default=str)
                facts[name] = f"{given} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
    ctx.dist.require_same("recipe", facts)
    if apart := differences(ctx.dist, versions()):
        ctx.log.warning("the ranks have other versions: %s; losses may differ", in_one(apart))
    one_or_more = {key: own[0] if len(own) == 1 else own for key, own in paths.items() if own}
    if apart := differences(ctx.dist, one_or_more):
        ctx.log.warning(
            "ranks have files in different places; the model, adapters, data and the "
            "tokenizer are compared: %s",
            in_one(apart),
        )


def require_same_artifact(artifact: Any, ctx: Context) -> None:
    """Raise StageError if a model or data differ between ranks (collective)."""
    if isinstance(artifact, ModelSource):
        sampled = artifact.sampled_contents
        facts = {"its architecture and files": artifact.fingerprint}
        ctx.dist.require_same("model", facts if sampled is None else {**facts, "weights": sampled})
        what = "size, header and a piece of every tensor" if sampled else "settings and seed"
        compared = f"the model's config, and of its weights {what}"
    elif isinstance(artifact, Data):
        ctx.dist.require_same("data", artifact.identity)
        compared = "the data"
    else:
        return
    if ctx.dist.world_size > 1:
        ctx.log.debug("all %d ranks have the same: %s", ctx.dist.world_size, compared)


def look_ahead(
    steps: Sequence[Step], ctx: Context, artifacts: Artifacts, slots: Collection[str]
) -> None:
    """Ask the stages of `slots` for the resources that they will need; raise StageError if some are
    missing. Only rank 0 asks: its machine also writes the exports."""
    if not ctx.dist.is_main:
        return
    found: list[ResourceNeed] = []
    known = Results({one.slot: artifacts[one.slot] for one in steps if one.slot in artifacts})
    for step in steps:
        stage = step.stage
        if step.slot not in slots or not isinstance(stage, NeedsResources):
            continue
        # without a model that a training before it is still to make: it will need the same as the
        # latest one
        kinds = {need.parameter: need.type for need in needs(type(stage))}
        inputs = {
            name: slot
            for name, slot in step.inputs.items()
            if slot in artifacts or not issubclass(ModelSource, kinds[name])
        }
        if not known.missing(stage, "resource_needs", inputs):
            own = dataclasses.replace(ctx, slot=step.slot, training=step.training)
            found += known.call(stage, "resource_needs", own, inputs)
    require_resources(found)


def run_dry(steps: Sequence[Step], ctx: Context, artifacts: Artifacts) -> None:
    """For `dry_run: true` (`pipe run --dry-run` starts no rank): save the engine's state and have
    every stage with `run_dry`, up to the next training, work on that checkpoint (collective).
    Everything written is removed again, unless it fails; random states stay unchanged."""
    from pipeline.checkpoint.write_plan import apply_random, capture_random

    folder, device = ctx.run_dir / f"{ctx.run_dir.name}.dry-run", ctx.dist.device
    ctx.log.info("dry run: saving, consolidating and exporting the untrained model")
    began = time.monotonic()
    removals: list[Callable[[], object]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(apply_random, capture_random(device), device)
        if ctx.dist.is_main:
            remove_folder(folder)
            folder.mkdir()
            removals.append(lambda: remove_folder(folder))
        ctx.dist.barrier()
        stage_ctx = dataclasses.replace(
            ctx, run_dir=folder, metrics=Metrics(None), on_exit=removals.append
        )
        _rehearse(steps, stage_ctx, dict(artifacts), stack)
    # After a failure everything stays, to be looked at, until the next dry run.
    ctx.dist.barrier()
    for remove in reversed(removals):
        remove()
    ctx.dist.barrier()
    ctx.log.info("dry run: passed in %.1f s; all of it is removed", time.monotonic() - began)


def _rehearse(
    steps: Sequence[Step], ctx: Context, artifacts: dict[str, Any], stack: contextlib.ExitStack
) -> None:
    checkpoints: Checkpoints | None = None
    saved = False
    for step in steps:
        of_another = step.training != ctx.training
        if issubclass(step.gives or object, TrainedRun):
            if of_another and not saved:
                continue
            if of_another or checkpoints is None:
                return
            checkpoints.save(Progress())
            saved = True
            artifacts[step.slot] = TrainedRun(checkpoint=checkpoints.finish(), progress=Progress())
        elif isinstance(step.stage, RunsDry) and not of_another:
            # in the order of slots: restored ones may have come first
            known = Results({s.slot: artifacts[s.slot] for s in steps if s.slot in artifacts})
            if known.missing(step.stage, "run_dry", step.inputs):
                continue
            ctx.log.info("dry run: %s: %s", step.slot, step.use)
            own = dataclasses.replace(ctx, slot=step.slot)
            made = known.call(step.stage, "run_dry", own, step.inputs)
            artifacts[step.slot] = made
            checkpoints = made if isinstance(made, Checkpoints) else checkpoints
            stack.callback(getattr(made, "close", lambda: None))
