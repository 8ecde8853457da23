"""The recipe of an export after the fact: a run's own, with its training replaced by a checkpoint.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint import location
from pipeline.checkpoint.retention import best_of
from pipeline.checkpoint.store import step_number
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource
from pipeline.contracts.tensors import Weights
from pipeline.contracts.training import TrainedRun
from pipeline.errors import PluginError, UsageError, system_errors_as
from pipeline.plan.registry import Registry
from pipeline.plan.wiring import SlotType, inputs
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe.dump import render
from pipeline.run import rundir
from pipeline.run.journal import Journal

EXPORT = "export"
"""The folder in a run where its model goes unless the recipe says another."""

Slots = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a person has asked for."""

    checkpoint: str
    """Path or address."""
    run: Path | None
    """The run that saved it."""
    model: str | None
    folder: Path
    """Where the export goes."""
    job: Path
    """Where its own log and journal are."""


def chosen(source: str, *, step: str | None, model: str | None, to: Path | None) -> Choice:
    """Find the checkpoint and its run. Raises UsageError."""
    if "://" not in source:
        source = str(Path(source).resolve())  # the recipe that names it lies elsewhere
    run = _run(source)
    if run is not None and str(run) == source:
        checkpoint = _checkpoint(source, step)
        name = EXPORT if step is None else f"{EXPORT}-{step if step == 'best' else f'step-{step}'}"
        folder = (to or run / name).absolute()
        job = run / "exports" / folder.name
        return Choice(checkpoint=checkpoint, run=run, model=model, folder=folder, job=job)
    if step is not None:
        raise UsageError(f"--step is for a run; {source} is one checkpoint")
    if "://" not in source and not Path(source).is_dir():
        raise UsageError(f"no such folder: {source}")
    if run is None and model is None:
        raise UsageError(
            f"{source} does not lie in a run, so its architecture is not known",
            hint="--model names the model that was trained from",
        )
    if to is None:
        raise UsageError("--to is missing: the folder to write")
    folder = to.absolute()
    job = folder.with_name(f"{folder.name}.job")
    return Choice(checkpoint=source, run=run, model=model, folder=folder, job=job)


def recipe_text(choice: Choice, settings: Mapping[str, Any], procs: int) -> str:
    """As YAML; `settings` are of the export slot. Raises UsageError, RecipeError, PluginError."""
    trained = {"use": "train.finished", "checkpoint": choice.checkpoint}
    if choice.run is not None:
        recipe = load_recipe(choice.run / rundir.RECIPE)
        content = recipe.public()
        slots = _kept(recipe, content["stages"], trained)
        if choice.model is not None:  # in place of the run's; an adapter on it stays
            source = next(link.slot for link in _links(slots) if _gives(link, ModelSource))
            slots[source] = _model(choice.model)
        name, seed, env = recipe.name, recipe.seed, content.get("env")
    else:
        assert choice.model is not None
        slots = {"model": _model(choice.model), "train": trained}
        name, seed, env = choice.folder.name, 0, None
    export = _completed(slots)
    slots[export] = {**slots[export], "folder": str(choice.folder), **settings}
    return render(
        {
            "name": name,
            "seed": seed,
            "launch": {"procs": procs, "device": "cpu"},
            **({"env": env} if env else {}),
            "stages": slots,
        }
    )


def exports_of(run: Path) -> list[Path]:
    """The folders that a run has exported to; of slots that have not finished, those that its
    recipe names. Raises UsageError, JournalDamaged."""
    stages = load_recipe(run / rundir.RECIPE).public()["stages"]
    slots = [link.slot for link in _links(stages) if _gives(link, ExportedModel)]
    if not slots:
        raise UsageError(f"{run} exports nothing", hint="pipe export writes one")
    finished = Journal(run / rundir.JOURNAL).finished()
    records = {slot: finished[slot].record or {} for slot in slots if slot in finished}
    named = [
        records.get(slot, {}).get("folder") or stages[slot].get("folder") or run / EXPORT
        for slot in slots
    ]
    return [Path(folder).expanduser() for folder in named]


def _run(source: str) -> Path | None:
    """The run that `source` is, or that has saved it."""
    if "://" in source:
        return None
    folder = Path(source)
    if (folder / rundir.RECIPE).is_file():
        return folder
    saver = folder.parent.parent
    ours = step_number(folder.name) is not None and (saver / rundir.RECIPE).is_file()
    place = location.known(saver) if ours else None
    return saver if place and Path(place).resolve() == folder.parent else None


def _checkpoint(run: str, step: str | None) -> str:
    """Address of the run's checkpoint of a step, the best or the newest."""
    store, name = location.find(run)
    with system_errors_as(UsageError):
        names = store.names()
        if step is None:
            name = name or names[-1]
        elif step == "best":
            best = best_of(store, names, 1)
            if not best:
                raise UsageError(f"no checkpoint of {run} has a loss on held-out data")
            name = best.pop()
        elif not re.fullmatch("[0-9]{1,18}", step):
            raise UsageError(
                f"--step {step[:40]}: neither `best` nor a number that a step can have"
            )
        else:
            name = f"step-{step:0>8}"
            if name not in names:
                there = ", ".join(str(step_number(one)) for one in names)
                raise UsageError(f"{run} has no checkpoint of step {step}; there are {there}")
        return store.locate(name)


def _kept(recipe: Recipe, content: Mapping[str, Any], trained: dict[str, Any]) -> Slots:
    """The slots that the export needs, the one that trains replaced."""
    links = list(_links(content))
    place = {link.slot: number for number, link in enumerate(links)}
    ends = [link.slot for link in links if _gives(link, ExportedModel)][-1:]
    wanted = ends or [link.slot for link in links if _gives(link, ModelSource | TrainedRun)]
    kept: set[str] = set()
    while wanted:
        slot = wanted.pop()
        kept.add(slot)
        link = links[place[slot]]
        if link.kind is not None and not _gives(link, TrainedRun):
            found = inputs(links, place[slot]).values()
            wanted += [one for one in found if one is not None and one not in kept]
    slots = {
        link.slot: dict(trained) if _gives(link, TrainedRun) else dict(content[link.slot])
        for link in links
        if link.slot in kept
    }
    if not any("checkpoint" in slot and slot["use"] == trained["use"] for slot in slots.values()):
        raise UsageError(f"recipe `{recipe.name}` has no slot that trains")
    return slots


def _completed(slots: Slots) -> str:
    """Add what every export needs and `slots` lack; the name of the slot that exports."""
    links = list(_links(slots))
    found = [link.slot for link in links if _gives(link, ExportedModel)]
    last = found[-1] if found else _free("export", slots)
    exporter = slots.pop(last, {"use": "export.safetensors"})
    if not any(_gives(link, Weights) for link in links):
        slots[_free("consolidate", slots)] = {"use": "consolidate.stream"}
    slots[last] = exporter
    for slot in slots.values():
        if "attention" in slot:  # nothing is trained, so no kernels are needed
            slot["attention"] = "eager"
    return last


def _free(name: str, slots: Slots) -> str:
    return name if name not in slots else _free(f"{name}_", slots)


def _links(slots: Mapping[str, Any]) -> Iterator[SlotType]:
    """Stages that cannot be loaded any more may be those that the export does not need."""
    registry = Registry.installed()
    for slot, spec in slots.items():
        kind = None
        with contextlib.suppress(PluginError, KeyError):
            kind = registry.load(spec["use"])
        yield SlotType(slot=slot, use=spec["use"], kind=kind)


def _gives(link: SlotType, kinds: Any) -> bool:
    return link.gives is not None and issubclass(link.gives, kinds)


def _model(text: str) -> dict[str, Any]:
    """A model slot: a local path, or a hub id with its revision."""
    if Path(text).expanduser().exists():
        return {"use": "model.hf", "path": str(Path(text).expanduser().absolute())}
    repo, mark, revision = text.partition("@")
    if not mark:
        raise UsageError(
            f"--model: {text} is neither a path nor a hub id with its revision",
            hint="for a hub id: --model ID@COMMIT",
        )
    return {"use": "model.hf", "path": repo, "revision": revision}
