"""The recipe of an export after the fact: a run's own, with a training replaced by a checkpoint,
and those before it by what they returned.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.chain.artifacts import training_slots
from pipeline.chain.registry import Registry
from pipeline.chain.wiring import SlotType, wired
from pipeline.checkpoint import location
from pipeline.checkpoint.location import open_store
from pipeline.checkpoint.retention import best_of
from pipeline.checkpoint.store import step_number
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource
from pipeline.contracts.plan_view import Wiring
from pipeline.contracts.tensors import Weights
from pipeline.contracts.training import TrainedRun
from pipeline.errors import PluginError, UsageError, system_errors_as
from pipeline.execution import rundir
from pipeline.execution.journal import Journal
from pipeline.recipe import load_recipe
from pipeline.recipe.dump import render

EXPORT = "export"
"""The default folder of an export in its run."""
EXPORTS = "exports"
"""Folder of a run with a job, which is locked like a run, for each later export of it."""
Slots = dict[str, dict[str, Any]]


class Choice(NamedTuple):
    """A checkpoint (path or address), the run that saved it, the model to use instead of the run's,
    the folder to write, the folder of the export's own log and journal, and the slot of the
    training (empty: the first; None: as the place of the checkpoint says)."""

    checkpoint: str
    run: Path | None
    model: str | None
    folder: Path
    job: Path
    training: str | None = None


def chosen(source: str, *, step: str | None, model: str | None, to: Path | None) -> Choice:
    """Find the checkpoint and its run. Raises UsageError."""
    run, given = None, Path(source)
    if "://" not in source:
        source = str(Path(source).resolve())  # the recipe that names it lies elsewhere
        run = saver(Path(source))
    if run is not None and str(run) == source:
        checkpoint = checkpoint_of(source, step)
        name = EXPORT if step is None else f"{EXPORT}-{step if step == 'best' else f'step-{step}'}"
        folder = (to or run / name).absolute()
        return Choice(checkpoint, run, model, folder, _job(run, folder))
    if step is not None:
        raise UsageError(f"--step is for a run; {source} is one checkpoint")
    if "://" not in source and not Path(source).is_dir():
        wrong = f"{given} is not a folder" if given.exists() else f"no such folder: {source}"
        raise UsageError(wrong, hint=rundir.run_meant(given))
    if run is None and model is None:
        raise UsageError(
            f"{source} does not lie in a run, so its architecture is not known",
            hint="--model names the model that was trained from",
        )
    if to is None:
        raise UsageError("--out is missing: the folder to write")
    folder = to.absolute()
    return Choice(source, run, model, folder, _job(run, folder))


def _job(run: Path | None, folder: Path) -> Path:
    """Folder of the export's own journal: in the run, where `pipe clean` sees it, or next to the
    export where that cannot be written."""
    if run is not None and os.access(run, os.W_OK):
        elsewhere = (
            "" if folder.parent == run else f"-{sha256(os.fsencode(folder)).hexdigest()[:8]}"
        )
        return run / EXPORTS / f"{folder.name}{elsewhere}"
    return folder.with_name(f"{folder.name}.job")


def saver(folder: Path) -> Path | None:
    """The run that `folder` is, or that has saved it."""
    if (folder / rundir.RECIPE).is_file():
        return folder
    saver = folder.parent.parent
    ours = step_number(folder.name) is not None and (saver / rundir.RECIPE).is_file()
    return saver if ours and _training_at(saver, str(folder)) is not None else None


def _training_at(run: Path, checkpoint: str) -> str | None:
    """The slot of the run's training that has saved a checkpoint, empty for the first; None where
    none has."""
    place = (
        checkpoint.rpartition("/")[0] if "://" in checkpoint else Path(checkpoint).resolve().parent
    )
    known = location.places(run).items()
    found = (slot for slot, one in known if place == (one if "://" in one else Path(one).resolve()))
    return next(found, None)


def checkpoint_of(run: str, step: str | None) -> str:
    """Address of the run's checkpoint of a step, the best or the newest. Raises UsageError."""
    store, name = location.find(run)
    with system_errors_as(UsageError):
        names = store.names()
        if step is None:
            return store.locate(name or names[-1])
        if step == "best":
            for best in best_of(store, names, 1):
                return store.locate(best)
            raise UsageError(
                f"no checkpoint of {run} has a loss on held-out data", hint=_others(run)
            )
        name = f"step-{step:0>8}"
        if name not in names:
            there = ", ".join(str(step_number(one)) for one in names)
            raise UsageError(
                f"{run} has no checkpoint of step {step[:40]}; it has {there}", hint=_others(run)
            )
        return store.locate(name)


def _others(run: str) -> str:
    """The newest checkpoint of each earlier training; empty if the run trains once."""
    stores = map(open_store, location.earlier(run))
    newest = [store.locate(names[-1]) for store in stores if (names := store.names())]
    return f"or name a checkpoint of an earlier training: {', '.join(newest)}" if newest else ""


def recipe_text(choice: Choice, settings: Mapping[str, Any], procs: int) -> str:
    """The recipe as YAML, with `settings` of the export slot. Raises PipeError."""
    trained = _finished(choice.checkpoint)
    if choice.run is not None:
        recipe = load_recipe(rundir.existing(choice.run) / rundir.RECIPE)
        content = recipe.public()
        slots = _kept(recipe.name, content["stages"], trained, choice)
        if choice.model is not None:  # an adapter on the run's model stays
            source = next(link.slot for link in _links(slots) if _gives(link, ModelSource))
            slots[source] = _model(choice.model)
        name, seed, env = recipe.name, recipe.seed, content.get("env", [])
    else:
        assert choice.model is not None
        slots = {"model": _model(choice.model), "train": trained}
        name, seed, env = choice.folder.name, 0, []
    export = _completed(slots)
    slots[export] = {**slots[export], "folder": str(choice.folder), **settings}
    launch = {"procs": procs, "device": "cpu"}
    return render({"name": name, "seed": seed, "env": env, "launch": launch, "stages": slots})


def _finished(checkpoint: str) -> dict[str, Any]:
    return {"use": Registry.installed().giving(TrainedRun), "checkpoint": checkpoint}


def _kept(
    recipe: str, content: Mapping[str, Any], trained: dict[str, Any], choice: Choice
) -> Slots:
    """The slots that the export needs, with `trained` instead of the one that trains, and each
    earlier training as it ended."""
    assert choice.run is not None
    links = list(_links(content))
    trains = [link.slot for link in links if _gives(link, TrainedRun)]
    if not trains:
        raise UsageError(f"recipe `{recipe}` has no slot that trains")
    found = _training_at(choice.run, choice.checkpoint)
    training = found if choice.training is None else choice.training
    wiring = wired(links)
    target = training or next(iter(training_slots(wiring)), trains[0])
    ends = [link.slot for link in links if _gives(link, ExportedModel)
            and _trained_in(wiring, link.slot) in (target, None)][-1:]  # fmt: skip
    model = wiring.producer(target, ModelSource)
    models = [model] if model else [link.slot for link in links if _gives(link, ModelSource)]
    kept, slots = {*ends} or {target, *models}, Slots()
    for link in reversed(links):
        if link.slot == target:
            slots[link.slot] = dict(trained)
        elif link.slot in kept and _gives(link, TrainedRun):
            slots[link.slot] = _finished(_result(choice.run, link.slot))
        elif link.slot in kept:
            slots[link.slot] = dict(content[link.slot])
            kept |= {slot for slot in wiring.inputs[link.slot].values() if slot is not None}
    return dict(reversed(slots.items()))


def _trained_in(wiring: Wiring, slot: str) -> str | None:
    """The training whose weights a slot takes; None where that is not known."""
    return wiring.producer(wiring.producer(slot, Weights) or slot, TrainedRun)


def _result(run: Path, slot: str) -> str:
    """The checkpoint that a finished training has returned. Raises UsageError."""
    done = Journal(run / rundir.JOURNAL).state().finished.get(slot)
    if done is None or not done.record:
        raise UsageError(
            f"slot `{slot}` of {run} has not finished, whose model was trained further"
        )
    return str(done.record["checkpoint"])


def _completed(slots: Slots) -> str:
    """Add the slots that an export needs to `slots`; return the name of the slot that exports."""
    stages, links = Registry.installed(), list(_links(slots))
    for link in links:
        spec, changes = slots[link.slot], getattr(link.kind, "for_export", {})
        spec |= {key: value for key, value in changes.items() if key in spec}
    found = [link.slot for link in links if _gives(link, ExportedModel)]
    last = found[-1] if found else _free("export", slots)
    exporter = slots.pop(last, None)
    if not any(_gives(link, Weights) for link in links):
        slots[_free("consolidate", slots)] = {"use": stages.giving(Weights, TrainedRun)}
    slots[last] = exporter or {"use": stages.giving(ExportedModel, Weights, ModelSource)}
    return last


def _free(name: str, slots: Slots) -> str:
    return name if name not in slots else _free(f"{name}_", slots)


def trained_in(run: Path, folder: Path) -> str | None:
    """The training whose model a slot of the run has exported to a folder, empty for the first;
    None where no slot has, as after `pipe export`."""
    stages = load_recipe(rundir.existing(run) / rundir.RECIPE).public()["stages"]
    wiring = wired(list(_links(stages)))
    slots = [slot for slot in wiring.kinds if wiring.gives(slot, ExportedModel)]
    with contextlib.suppress(UsageError):
        for slot, one in zip(slots, exports_of(run), strict=True):
            if one.resolve() == folder.resolve():
                training = _trained_in(wiring, slot)
                return "" if training in training_slots(wiring)[:1] else training
    return None


def exports_of(run: Path) -> list[Path]:
    """The folders that a run has exported to; for slots that have not finished, the recipe's.
    Raises UsageError, JournalDamaged."""
    stages = load_recipe(rundir.existing(run) / rundir.RECIPE).public()["stages"]
    slots = [link.slot for link in _links(stages) if _gives(link, ExportedModel)]
    if not slots:
        raise UsageError(f"{run} exports nothing", hint="pipe export writes one")
    finished = Journal(run / rundir.JOURNAL).state().finished.items()
    records = {slot: done.record or {} for slot, done in finished}
    named = (records.get(slot, {}).get("folder") or stages[slot].get("folder") for slot in slots)
    return [Path(folder or run / EXPORT).expanduser() for folder in named]


def _links(slots: Mapping[str, Any]) -> Iterator[SlotType]:
    """The slots with their stages' classes; None for a stage that cannot be loaded any more."""
    registry = Registry.installed()
    for slot, spec in slots.items():
        kind = None
        with contextlib.suppress(PluginError, KeyError):
            kind = registry.load(spec["use"])
        yield SlotType(slot=slot, use=spec["use"], kind=kind, takes=spec.get("takes") or {})


def _gives(link: SlotType, kinds: Any) -> bool:
    return link.gives is not None and issubclass(link.gives, kinds)


def _model(text: str) -> dict[str, Any]:
    """A model slot: a local path, or a hub id (ID or ID@REVISION)."""
    use, path = Registry.installed().giving(ModelSource), Path(text).expanduser()
    if path.exists():
        return {"use": use, "path": str(path.absolute())}
    if text.startswith(("/", "./", "../", "~")):
        raise UsageError(f"--model: there is no {text}")
    repo, _, revision = text.partition("@")
    return {"use": use, "path": repo, **({"revision": revision} if revision else {})}
