"""The recipe of an export after the fact: a run's own, with a training replaced by a checkpoint,
and those before it by what they returned.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.chain.artifacts import training_slots
from pipeline.chain.registry import Registry
from pipeline.chain.wiring import SlotType, wired
from pipeline.checkpoint import location
from pipeline.checkpoint.location import best_of, open_store
from pipeline.checkpoint.store import step_number
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource, Weights
from pipeline.contracts.plan_view import Wiring
from pipeline.contracts.training import TrainedRun
from pipeline.errors import PluginError, UsageError, system_errors_as
from pipeline.execution import rundir
from pipeline.execution.journal import Journal
from pipeline.recipe import load_recipe
from pipeline.recipe.dump import render
from pipeline.utils.files import expanded

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
        source = str(given.resolve())  # the recipe that names it lies elsewhere
        run = saver(Path(source))
    checkpoint = source
    if run is not None and str(run) == source:
        checkpoint = checkpoint_of(source, step)
        name = EXPORT if step is None else f"{EXPORT}-{step if step == 'best' else f'step-{step}'}"
        to = to or run / name
    elif step is not None:
        raise UsageError(f"--step is for a run; {source} is one checkpoint")
    elif "://" not in source and not Path(source).is_dir():
        wrong = f"{given} is not a folder" if given.exists() else f"no such folder: {source}"
        raise UsageError(wrong, hint=rundir.run_meant(given))
    elif run is None and model is None:
        raise UsageError(
            f"{source} does not lie in a run, so its architecture is not known",
            hint="--model names the model that was trained from",
        )
    if to is None:
        raise UsageError("--out is missing: the folder to write")
    folder = to.absolute()
    job = folder.with_name(f"{folder.name}.job")
    if run is not None and os.access(run, os.W_OK):  # where `pipe clean` sees it
        apart = "" if folder.parent == run else f"-{sha256(os.fsencode(folder)).hexdigest()[:8]}"
        job = run / EXPORTS / f"{folder.name}{apart}"
    return Choice(checkpoint, run, model, folder, job)


def saver(folder: Path) -> Path | None:
    """The run that `folder` is, or that has saved it."""
    if (folder / rundir.RECIPE).is_file():
        return folder
    run = folder.parent.parent
    ours = step_number(folder.name) is not None and (run / rundir.RECIPE).is_file()
    return run if ours and _training_at(run, str(folder)) is not None else None


def _training_at(run: Path, checkpoint: str) -> str | None:
    """The slot of the run's training that has saved a checkpoint, empty for the first; None where
    none has."""

    def resolved(place: str) -> str:
        return place if "://" in place else str(Path(place).resolve())

    place, known = resolved(checkpoint).rpartition("/")[0], location.places(run).items()
    return next((slot for slot, one in known if resolved(one) == place), None)


def checkpoint_of(run: str, step: str | None) -> str:
    """Address of the run's checkpoint of a step, the best or the newest. Raises UsageError."""
    store, name = location.find(run)
    with system_errors_as(UsageError):
        names = store.names()
        if step is None:
            return store.locate(name or names[-1])
        name = f"step-{step:0>8}"
        if step == "best":
            wrong = f"no checkpoint of {run} has a loss on held-out data"
            name = next(iter(best_of(store, names, 1)), "")
        else:
            there = ", ".join(str(step_number(one)) for one in names)
            wrong = f"{run} has no checkpoint of step {step[:40]}; it has {there}"
        if name in names:
            return store.locate(name)
        stores = map(open_store, location.earlier(run))
        newest = ", ".join(one.locate(found[-1]) for one in stores if (found := one.names()))
        hint = f"or name a checkpoint of an earlier training: {newest}" if newest else ""
        raise UsageError(wrong, hint=hint)


def recipe_text(choice: Choice, settings: Mapping[str, Any], procs: int) -> str:
    """The recipe as YAML, with `settings` of the export slot. Raises PipeError."""
    trained = {"use": Registry.installed().giving(TrainedRun), "checkpoint": choice.checkpoint}
    if choice.run is not None:
        recipe = load_recipe(rundir.existing(choice.run) / rundir.RECIPE)
        content = recipe.public()
        slots = _kept(recipe.name, content["stages"], trained, choice)
        if choice.model is not None:  # an adapter on the run's model stays
            slots[_giving(_links(slots), ModelSource)[0]] = _model(choice.model)
        name, seed, env = recipe.name, recipe.seed, content.get("env", [])
    else:
        assert choice.model is not None
        slots = {"model": _model(choice.model), "train": trained}
        name, seed, env = choice.folder.name, 0, []
    export = _completed(slots)
    slots[export] = {**slots[export], "folder": str(choice.folder), **settings}
    launch = {"procs": procs, "device": "cpu"}
    return render({"name": name, "seed": seed, "env": env, "launch": launch, "stages": slots})


def _kept(
    recipe: str, content: Mapping[str, Any], trained: dict[str, Any], choice: Choice
) -> Slots:
    """The slots that the export needs, with `trained` instead of the one that trains, and each
    earlier training as it ended."""
    assert choice.run is not None
    links = _links(content)
    wiring, trains = wired(links), _giving(links, TrainedRun)
    if not trains:
        raise UsageError(f"recipe `{recipe}` has no slot that trains")
    saved_by = _training_at(choice.run, choice.checkpoint)
    training = saved_by if choice.training is None else choice.training
    target = training or next(iter(training_slots(wiring)), trains[0])
    exports = _giving(links, ExportedModel)
    own = [slot for slot in exports if _trained_in(wiring, slot) in (target, None)]
    model = wiring.producer(target, ModelSource)
    kept = {*own[-1:]} or {target, *([model] if model else _giving(links, ModelSource))}
    slots: Slots = {}
    for slot in reversed([link.slot for link in links]):
        if slot == target:
            slots[slot] = dict(trained)
        elif slot in kept and slot in trains:
            done = Journal(choice.run / rundir.JOURNAL).state().finished.get(slot)
            if done is None or not done.record:
                wrong = f"slot `{slot}` of {choice.run} has not finished"
                raise UsageError(f"{wrong}, whose model was trained further")
            slots[slot] = {**trained, "checkpoint": str(done.record["checkpoint"])}
        elif slot in kept:
            slots[slot] = dict(content[slot])
            kept |= {taken for taken in wiring.inputs[slot].values() if taken is not None}
    return dict(reversed(slots.items()))


def _trained_in(wiring: Wiring, slot: str) -> str | None:
    """The training whose weights a slot takes; None where that is not known."""
    return wiring.producer(wiring.producer(slot, Weights) or slot, TrainedRun)


def _completed(slots: Slots) -> str:
    """Add the slots that an export needs to `slots`; return the name of the slot that exports."""
    stages, links = Registry.installed(), _links(slots)
    for link in links:
        spec, changes = slots[link.slot], getattr(link.kind, "for_export", {})
        spec |= {key: value for key, value in changes.items() if key in spec}

    def free(name: str) -> str:
        return name if name not in slots else free(f"{name}_")

    last = (_giving(links, ExportedModel) or [free("export")])[-1]
    exporter = slots.pop(last, None)
    if not _giving(links, Weights):
        slots[free("consolidate")] = {"use": stages.giving(Weights, TrainedRun)}
    slots[last] = exporter or {"use": stages.giving(ExportedModel, Weights, ModelSource)}
    return last


def trained_in(run: Path, folder: Path) -> str | None:
    """The training whose model a slot of the run has exported to a folder, empty for the first;
    None where no slot has, as after `pipe export`."""
    with contextlib.suppress(UsageError):
        links = _links(load_recipe(rundir.existing(run) / rundir.RECIPE).public()["stages"])
        wiring = wired(links)
        for slot, one in zip(_giving(links, ExportedModel), exports_of(run), strict=True):
            if one.resolve() == folder.resolve():
                training = _trained_in(wiring, slot)
                return "" if training in training_slots(wiring)[:1] else training
    return None


def exports_of(run: Path) -> list[Path]:
    """The folders that a run has exported to; for slots that have not finished, the recipe's.
    Raises UsageError, JournalDamaged."""
    stages = load_recipe(rundir.existing(run) / rundir.RECIPE).public()["stages"]
    slots = _giving(_links(stages), ExportedModel)
    if not slots:
        raise UsageError(f"{run} exports nothing", hint="pipe export writes one")
    finished = Journal(run / rundir.JOURNAL).state().finished.items()
    records = {slot: done.record or {} for slot, done in finished}
    named = (records.get(slot, {}).get("folder") or stages[slot].get("folder") for slot in slots)
    return [expanded(folder or run / EXPORT) for folder in named]


def _links(slots: Mapping[str, Any]) -> list[SlotType]:
    """The slots with their stages' classes; None for a stage that cannot be loaded any more."""
    registry, links = Registry.installed(), []
    for slot, spec in slots.items():
        kind = None
        with contextlib.suppress(PluginError, KeyError):
            kind = registry.load(spec["use"])
        takes = spec.get("takes") or {}
        links.append(SlotType(slot=slot, use=spec["use"], kind=kind, takes=takes))
    return links


def _giving(links: Sequence[SlotType], kind: Any) -> list[str]:
    return [link.slot for link in links if issubclass(link.gives or object, kind)]


def _model(text: str) -> dict[str, Any]:
    """A model slot: a local path, or a hub id (ID or ID@REVISION)."""
    use, path = Registry.installed().giving(ModelSource), expanded(text)
    if path.exists():
        return {"use": use, "path": str(path.absolute())}
    if text.startswith(("/", "./", "../", "~")):
        raise UsageError(f"--model: there is no {text}")
    repo, _, revision = text.partition("@")
    return {"use": use, "path": repo, **({"revision": revision} if revision else {})}
