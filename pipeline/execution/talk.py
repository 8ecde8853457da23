"""The model to talk to: a run's newest export or checkpoint, an export, a checkpoint; and the model
that its training started from. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.chain.plan import Plan, plan_file
from pipeline.chain.registry import Registry
from pipeline.checkpoint import location
from pipeline.checkpoint.store import step_number
from pipeline.contracts.export import EXPORT_MANIFEST, ExportedModel, OpensText, TextModel
from pipeline.contracts.model import ModelSource
from pipeline.contracts.stage import Context
from pipeline.contracts.tensors import Weights
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
    """Whether there is a model of this run to talk to; one that has no tokenizer does not talk."""
    try:
        exports = _exports(run)
        if exports:
            newest = _newest(exports)  # an adapter speaks with the tokenizer of its base
            return any(newest.glob("tokenizer*")) or (newest / CONFIGS[1]).is_file()
        return location.known(run) is not None and _has_tokenizer(run)
    except (PipeError, OSError):
        return False


def _has_tokenizer(run: Path) -> bool:
    """Whether a run has trained on the tokens of a tokenizer; of a training that has not finished,
    that is not known, and assumed."""
    for done in Journal(run / rundir.JOURNAL).state().finished.values():
        progress = (done.record or {}).get("progress")
        lineage = progress.get("lineage") if isinstance(progress, dict) else None
        if isinstance(lineage, dict) and "tokenizer" in lineage:
            return lineage["tokenizer"] is not None
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
        if _opens(folder):
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
    exports = _exports(run) if step is None else []
    if exports:
        newest = _newest(exports)
        at = _exported_step(newest)
        folder = newest.absolute()
        return Subject(run=run.absolute(), folder=folder, step=at, newer=_newer(run, newest, at))
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
    """The exports of a run that can be opened, by its slots and by `pipe export`."""
    slots: list[Path] = []
    with contextlib.suppress(UsageError):  # its recipe exports nothing
        slots = exports_of(run)
    later = [one for one in run.glob(f"{EXPORT}*") if not one.name.endswith(PARTIAL)]
    there = [one for one in [*slots, *later] if (one / EXPORT_MANIFEST).is_file()]
    return [one for one in there if any((one / name).is_file() for name in CONFIGS) or _opens(one)]


def _newest(exports: list[Path]) -> Path:
    return max(exports, key=lambda one: (one / EXPORT_MANIFEST).stat().st_mtime)


def _opens(folder: Path) -> bool:
    """Whether the stage that wrote an export opens it; one that is not known may be built in."""
    name, registry = _manifest(folder).get("writer"), Registry.installed()
    if not isinstance(name, str):
        return True
    with contextlib.suppress(PluginError):
        return name in registry and issubclass(registry.load(name), OpensText)
    return False


def _newer(run: Path, export: Path, step: int | None) -> int | None:
    """The step of the run's newest checkpoint, if that is of a later step than the export, and of
    the same training."""
    with contextlib.suppress(PipeError):
        if trained_in(run, export) not in (None, next(reversed(location.places(run)), "")):
            return None
        store, _ = location.find(str(run.resolve()))
        newest = step_number(store.names()[-1])
        return newest if step is not None and newest is not None and newest > step else None
    return None


def _exported_step(folder: Path) -> int | None:
    facts = _manifest(folder).get("facts")
    digits = str(facts.get("steps") if isinstance(facts, dict) else "").replace(",", "")
    return int(digits) if digits.isdecimal() else None


def _manifest(folder: Path) -> dict[str, Any]:
    return json_object(folder / EXPORT_MANIFEST, most=MOST)


class Opener:
    """Opens a subject's models. Slots of its run's recipe run once, when one of them is needed."""

    def __init__(self, subject: Subject, ctx: Context) -> None:
        self._subject, self._ctx = subject, ctx
        self._artifacts: dict[str, Any] = {}

    def trained(self) -> TextModel:
        """Load the trained model. Raises UsageError, StageError."""
        subject = self._subject
        if subject.folder is not None:
            adapter = (subject.folder / CONFIGS[1]).is_file() and subject.run is not None
            return _writer(subject.folder).open_folder(
                subject.folder,
                self._ctx,
                self._given(ModelSource) if adapter else None,
                trust_remote_code=trusted(TRUST_CODE),
            )
        weights, model = self._given(Weights), self._given(ModelSource)
        trained = self._given(TrainedRun)
        return self._exporter.open_trained(self._ctx, weights, model, trained)

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
        """The artifact of a kind: that which the export takes, or the latest one. Raises UsageError
        if no slot returns one."""
        plan = self._plan
        taken = plan.slots[-1].inputs.values()
        steps = sorted(plan.slots, key=lambda each: each.slot in taken)  # stable
        found = [each for each in steps if each.gives and issubclass(each.gives, kind)]
        if not found:
            raise UsageError(f"no slot of the run's recipe returns {kind.__name__}")
        return artifact(plan, found[-1], self._ctx, self._artifacts)


@contextlib.contextmanager
def opener(subject: Subject, log: logging.Logger, device: str) -> Iterator[Opener]:
    """Yield an opener of the subject's models onto a device (`cpu`, `cuda`, `cuda:1`); `auto` is a
    GPU if there is one. Raises UsageError for a device that is not there."""
    with scratch_context(log, device=_device(device)) as ctx:
        yield Opener(subject, ctx)


def _device(asked: str) -> str:
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(asked)
    except RuntimeError:
        raise UsageError(f"--device: {asked} is not a device", hint="cpu, cuda, cuda:1") from None
    if kind.type not in ("cpu", "cuda"):
        raise UsageError(f"--device: {asked} is not supported", hint="cpu, cuda, cuda:1")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device: there is no {asked}",
            hint=f"this machine has {plural(torch.cuda.device_count(), 'GPU')} that torch can use",
        )
    return asked


def _writer(folder: Path) -> type[OpensText]:
    """The stage that opens a folder: the one that wrote it, or the built-in one."""
    name = _manifest(folder).get("writer")
    registry = Registry.installed()
    if isinstance(name, str) and name in registry:
        stage = registry.load(name)
        if issubclass(stage, OpensText):
            return stage
    return _default()


def _default() -> type[OpensText]:
    registry = Registry.installed()
    stage = registry.load(registry.giving(ExportedModel, Weights, ModelSource))
    assert issubclass(stage, OpensText)
    return stage
