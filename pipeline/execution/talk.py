"""The model to talk to: a run's newest export or checkpoint, an export, a checkpoint; and the model
that its training started from. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.chain.plan import Plan, plan_file
from pipeline.chain.registry import Registry
from pipeline.checkpoint import location
from pipeline.checkpoint.store import step_number
from pipeline.contracts.export import EXPORT_MANIFEST, ExportedModel, OpensText, TextModel
from pipeline.contracts.model import ModelSource, Weights
from pipeline.contracts.stage import Context
from pipeline.contracts.training import TrainedRun
from pipeline.errors import PipeError, PluginError, UsageError
from pipeline.execution import rundir
from pipeline.execution.export_recipe import (
    EXPORT,
    Choice,
    checkpoint_of,
    exports_of,
    recipe_text,
    saver,
    trained_in,
)
from pipeline.execution.in_process import artifact, scratch_context
from pipeline.execution.journal import Journal
from pipeline.utils.foreign import TRUST_CODE, json_object, trusted
from pipeline.utils.text import plural, shown_path

CONFIGS = ("config.json", "adapter_config.json")
"""Files by which a folder that transformers or peft loads is known."""
MOST = 1 << 28
"""Most bytes of an export's manifest."""
PARTIAL = ".partial"
NO_CHECKPOINT = "."
"""Instead of a checkpoint, where only the model that it started from is read."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to talk to: in a `folder` in Hugging Face layout, or in a `checkpoint`."""

    run: Path | None
    """The run that trained it, if that is known."""
    folder: Path | None = None
    checkpoint: str | None = None
    step: int | None = None
    """Step of its training, if that is known."""
    newer: int | None = None
    """Step of a checkpoint of the run that is newer than `folder`."""

    def __str__(self) -> str:
        where = self.checkpoint if self.folder is None else str(self.folder)
        shown = shown_path(where or "")
        return shown if self.step is None else f"step {self.step}, {shown}"


def can_talk(run: Path) -> bool:
    """Whether there is a model of this run to talk to: one that has a tokenizer, as far as that is
    known; of a training that has not finished, it is assumed."""
    try:
        for newest in _exports(run)[:1]:  # an adapter speaks with the tokenizer of its base
            return any(newest.glob("tokenizer*")) or (newest / CONFIGS[1]).is_file()
        if location.known(run) is None:
            return False
        for done in Journal(run / rundir.JOURNAL).state().finished.values():
            progress = (done.record or {}).get("progress")
            lineage = progress.get("lineage") if isinstance(progress, dict) else None
            if isinstance(lineage, dict) and "tokenizer" in lineage:
                return lineage["tokenizer"] is not None
    except (PipeError, OSError):
        return False
    return True


def found(source: str, step: str | None) -> Subject:
    """Find what a person means by a run, an export or a checkpoint; paths are absolute. Raises
    UsageError."""
    folder = Path(source)
    if "://" not in source and not folder.is_dir():
        raise UsageError(f"{source} is not there", hint="pipe ls shows runs")
    if (folder / rundir.RECIPE).is_file():
        return _in_run(folder, step)
    if step is not None:
        raise UsageError(f"--step is for a run, and {source} is not a run")
    if any((folder / name).is_file() for name in CONFIGS):
        parent = folder.resolve().parent
        run = parent if (parent / rundir.RECIPE).is_file() else None
        return Subject(run=run, folder=folder.absolute(), step=_exported_step(folder))
    if (folder / EXPORT_MANIFEST).is_file():
        if _writer(folder):
            raise UsageError(f"{source} is damaged: config.json is missing", hint="export it again")
        raise UsageError(
            f"{source} is not in Hugging Face layout, and the stage {_manifest(folder)['writer']}, "
            "which wrote it, does not open it",
            hint="name its run, whose checkpoints can be read",
        )
    run = saver(folder.resolve()) if "://" not in source else None
    if run is None:
        raise UsageError(
            f"{source} is not a run, an export or a checkpoint in a run",
            hint="pipe ls shows runs; pipe export --model makes an export of other checkpoints",
        )
    checkpoint = str(folder.resolve())
    return Subject(run=run, checkpoint=checkpoint, step=step_number(folder.resolve().name))


def _in_run(run: Path, step: str | None) -> Subject:
    rundir.existing(run)
    for export in _exports(run)[:1] if step is None else ():
        at, newer = _exported_step(export), None
        with contextlib.suppress(PipeError):  # a checkpoint of the same training
            if trained_in(run, export) in (None, next(reversed(location.places(run)), "")):
                store, _ = location.find(str(run.resolve()))
                newer = step_number(store.names()[-1])
        newer = newer if at is not None and newer is not None and newer > at else None
        return Subject(run=run.absolute(), folder=export.absolute(), step=at, newer=newer)
    if location.known(run) is None:
        running = rundir.is_locked(run)
        raise UsageError(
            f"{run} has nothing to talk to{' yet' if running else ''}: no export, no checkpoint",
            hint="`pipe status` shows where it is" if running else "`pipe resume` continues it",
        )
    checkpoint = checkpoint_of(str(run.absolute()), step)
    at = step_number(checkpoint.rpartition("/")[2])
    return Subject(run=run.absolute(), checkpoint=checkpoint, step=at)


def _exports(run: Path) -> list[Path]:
    """The exports of a run that can be opened, by its slots and by `pipe export`; the newest
    first."""
    slots: list[Path] = []
    with contextlib.suppress(UsageError):  # its recipe exports nothing
        slots = exports_of(run)
    later = [one for one in run.glob(f"{EXPORT}*") if not one.name.endswith(PARTIAL)]
    there = [one for one in [*slots, *later] if (one / EXPORT_MANIFEST).is_file()]
    found = [one for one in there if any((one / c).is_file() for c in CONFIGS) or _writer(one)]
    return sorted(found, key=lambda one: (one / EXPORT_MANIFEST).stat().st_mtime, reverse=True)


def _exported_step(folder: Path) -> int | None:
    facts = _manifest(folder).get("facts")
    digits = str(facts.get("steps") if isinstance(facts, dict) else "").replace(",", "")
    return int(digits) if digits.isdecimal() else None


def _manifest(folder: Path) -> dict[str, Any]:
    return json_object(folder / EXPORT_MANIFEST, most=MOST)


def _writer(folder: Path) -> type[OpensText] | None:
    """The stage that opens an export: the one that wrote it, and the built-in one if none is named;
    None if that does not open any, or is not installed."""
    name, registry = _manifest(folder).get("writer"), Registry.installed()
    if not isinstance(name, str):
        return _default()
    with contextlib.suppress(PluginError):
        stage = registry.load(name) if name in registry else object
        return stage if issubclass(stage, OpensText) else None
    return None


def _default() -> type[OpensText]:
    registry = Registry.installed()
    stage = registry.load(registry.giving(ExportedModel, Weights, ModelSource))
    assert issubclass(stage, OpensText)
    return stage


@dataclass(eq=False)
class Opener:
    """Opens a subject's models. Slots of its run's recipe run once, when one of them is needed."""

    _subject: Subject
    _ctx: Context
    _artifacts: dict[str, Any] = field(default_factory=dict, init=False)

    def trained(self) -> TextModel:
        """Load the trained model. Raises UsageError, StageError."""
        folder = self._subject.folder
        if folder is not None:
            adapter = (folder / CONFIGS[1]).is_file() and self._subject.run is not None
            base = self._given(ModelSource) if adapter else None
            writer, code = _writer(folder) or _default(), trusted(TRUST_CODE)
            return writer.open_folder(folder, self._ctx, base, trust_remote_code=code)
        given = self._given(Weights), self._given(ModelSource), self._given(TrainedRun)
        return self._exporter.open_trained(self._ctx, *given)

    def base(self) -> TextModel:
        """Load the model that the training started from. Raises UsageError, StageError."""
        if self._subject.run is None:
            raise UsageError(
                f"{self._subject.folder} does not lie in a run, so its base model is not known",
                hint="name the run instead",
            )
        return self._exporter.open_source(self._ctx, self._given(ModelSource))

    @functools.cached_property
    def _plan(self) -> Plan:
        """The recipe that exports the subject's checkpoint; only slots that are read run."""
        subject, scratch = self._subject, self._ctx.run_dir
        assert subject.run is not None
        run = subject.run.resolve()
        checkpoint = subject.checkpoint or NO_CHECKPOINT
        of = None if subject.folder is None else trained_in(run, subject.folder)
        choice = Choice(checkpoint, run, None, scratch / EXPORT, scratch, of)
        file = scratch / rundir.RECIPE
        file.write_text(recipe_text(choice, {}, 1), encoding="utf-8")
        return plan_file(file, skip_checks=True)

    @property
    def _exporter(self) -> OpensText:
        """The stage that would export it, or the built-in one if that loads no models."""
        stage = self._plan.slots[-1].stage
        return stage if isinstance(stage, OpensText) else _default()()

    def _given(self, kind: type) -> Any:
        """The artifact of a kind: the one that the export takes, or the latest. Raises UsageError
        if no slot returns one."""
        plan = self._plan
        taken = plan.slots[-1].inputs.values()
        found = [each for each in plan.slots if issubclass(each.gives or object, kind)]
        if not found:
            raise UsageError(f"no slot of the run's recipe returns {kind.__name__}")
        latest = sorted(found, key=lambda each: each.slot in taken)[-1]  # stable
        return artifact(plan, latest, self._ctx, self._artifacts)


@contextlib.contextmanager
def opener(subject: Subject, log: logging.Logger, device: str) -> Iterator[Opener]:
    """Yield an opener of the subject's models onto a device (`cpu`, `cuda`, `cuda:1`); `auto` is a
    GPU if there is one. Raises UsageError for a device that is not there."""
    import torch

    gpus, hint = torch.cuda.device_count(), "cpu, cuda, cuda:1"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise UsageError(f"--device: {device} is not a device", hint=hint) from None
    if asked.type not in ("cpu", "cuda"):
        raise UsageError(f"--device: {device} is not supported", hint=hint)
    if asked.type == "cuda" and (asked.index or 0) >= gpus:
        here = f"this machine has {plural(gpus, 'GPU')} that torch can use"
        raise UsageError(f"--device: there is no {device}", hint=here)
    with scratch_context(log, device=device) as ctx:
        yield Opener(subject, ctx)
