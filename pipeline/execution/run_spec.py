"""The decisions of the process that launches a run, handed over once: a rank reads no recipe file
and no journal, and checks nothing."""

from __future__ import annotations

import dataclasses
import json
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.chain.artifacts import training_of
from pipeline.chain.plan import Plan, PlannedSlot, make_plan
from pipeline.chain.registry import Registry
from pipeline.contracts.signature import gives
from pipeline.distributed.settings import ProcessCounts
from pipeline.errors import Location, PluginError, Problem, RecipeError, in_words
from pipeline.execution.resume import ResumePlan, digests
from pipeline.recipe.fields import build
from pipeline.recipe.interpolation import resolve
from pipeline.recipe.load import HEADER_KEYS, RecipeSettings, recipe_of
from pipeline.recipe.nodes import RESERVED, KeyPath, leaves, mapped, node_of
from pipeline.utils import terminal
from pipeline.utils.text import in_short


@dataclass(frozen=True, kw_only=True)
class Step(PlannedSlot):
    """One slot of a run, with what its launcher has decided."""

    digest: str
    """Of its settings, and of the slots that it depends on."""
    training: str
    """The slot of the training that it is of; empty for the first."""
    unread: tuple[str, ...]
    """Slots whose results are dropped after this one: it is their last reader."""


def steps_of(plan: Plan) -> list[Step]:
    """The slots of a plan, in order."""
    found, own = list[Step](), digests(plan)
    last = {one.slot: plan.last_reader(one.slot) or one.slot for one in plan.slots}
    for planned in plan.slots:
        training = training_of(plan.view.wiring, planned.slot)
        unread = tuple(slot for slot, reader in last.items() if reader == planned.slot)
        facts = {**vars(planned), "digest": own[planned.slot]}
        found.append(Step(**facts, training=training, unread=unread))
    return found


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run, as JSON. Values that depend on environment variables stay as written, so that no
    secret is in it: each process resolves them in its own environment."""

    run_dir: str
    recipe: Mapping[str, Any]
    """The merged recipe's values."""
    device: str = "cpu"
    slots: Sequence[Mapping[str, Any]] = ()
    """The fields of each Step; instead of the stage and the type of its result, `kind`: the stage's
    class as `module:Class`, empty where it is found by its entry point only."""
    todo: Sequence[str] = ()
    """Slots to run."""
    restore: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Slot that has finished -> record of its result, which a slot to run reads."""
    accept: Sequence[str] = ()
    """Changes that are intended (`pipe resume --accept`)."""
    warnings: Sequence[str] = ()
    """Findings of the checks that are probably mistakes, and results that are lost."""
    display: str = ""
    """Words of `pipeline.utils.terminal.shows` for rank 0."""

    @classmethod
    def of(cls, plan: Plan, run_dir: Path, accept: tuple[str, ...] = ()) -> RunSpec:
        """The spec of a checked plan, cut to what this start does."""
        slots = []
        for step in steps_of(plan):
            kind = type(step.stage)
            facts = {**vars(step), "kind": f"{kind.__module__}:{kind.__qualname__}"}
            try:
                own = pkgutil.resolve_name(facts["kind"])
            except (ValueError, ImportError, AttributeError):  # a function has made the class
                own = None
            facts |= {} if own is kind else {"kind": ""}
            del facts["stage"], facts["gives"]
            slots.append(facts)
        return cls(
            run_dir=str(run_dir),
            recipe=plan.recipe.public(),
            device=plan.view.device,
            slots=tuple(slots),
            accept=accept,
            warnings=tuple(map(str, plan.warnings)),
            display=terminal.shows,
        )

    def starting(self, found: ResumePlan) -> RunSpec:
        """The spec of a start of the ranks, with what is left to run."""
        warnings = tuple(dict.fromkeys((*self.warnings, *found.lost)))
        todo = tuple(sorted(found.run))
        return dataclasses.replace(self, todo=todo, restore=found.restore, warnings=warnings)

    def dump(self) -> str:
        """JSON text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> RunSpec:
        """The reverse of `dump`."""
        facts = json.loads(text)
        lists = {key: tuple(value) for key, value in facts.items() if isinstance(value, list)}
        return cls(**facts | lists)

    @property
    def place(self) -> Location:
        """Where its values are for a person to read."""
        return Location(file=f"{self.run_dir}/recipe.yaml")

    def plan(self, started: ProcessCounts) -> Plan:
        """The plan of its slots, for a run on so many processes. Raises RecipeError."""
        recipe = recipe_of(node_of(self.recipe, self.place))
        return make_plan(recipe, skip_checks=True, started=started).until(self.slots[-1]["slot"])

    def build(self) -> tuple[RecipeSettings, list[Step]]:
        """The recipe's settings and the slots, their stages built of the values. Raises RecipeError
        for values of the environment, PluginError for a stage that this machine lacks."""
        values: Any = self.recipe
        place = self.place
        if "${" in json.dumps(values):
            values, problems = resolve(node_of(values, place))
            if problems:
                raise RecipeError(problems)
        header = {key: values[key] for key in HEADER_KEYS if key in values}
        parts: list[tuple[Any, dict[str, Any], KeyPath]] = [(RecipeSettings, header, ())]
        facts = [{**one, "unread": tuple(one["unread"])} for one in self.slots]
        for one in facts:
            try:
                name = one.pop("kind")
                kind = pkgutil.resolve_name(name) if name else Registry.installed().load(one["use"])
                one["gives"] = gives(kind)
            except Exception as error:
                why = f"stage `{one['use']}` cannot be loaded: {in_words(error)}"
                raise PluginError(why, hint="every machine needs the same packages") from error
            written = values["stages"][one["slot"]]
            fields = {key: value for key, value in written.items() if key not in RESERVED}
            parts.append((kind, fields, ("stages", one["slot"])))
        built, wrong = list[Any](), list[Problem]()
        for kind, fields, path in parts:
            try:
                built.append(TypeAdapter(kind).validate_json(json.dumps(fields), strict=True))
            except ValidationError:
                wrong += build(kind, fields, tree=node_of(values, place), path=path)[1]
        if wrong:
            raise RecipeError(wrong)
        settings, *stages = built
        return settings, [Step(**o, stage=stage) for o, stage in zip(facts, stages, strict=True)]


A_PATH = "a path"


def recipe_differences(here: Mapping[str, Any], there: Mapping[str, Any], place: str) -> list[str]:
    """A sentence for each value of two recipes that is not the same here and at the other `place`.
    Absolute paths may differ, as machines may keep files in different places; so may
    `launch`: how a machine starts."""

    def values(recipe: Mapping[str, Any]) -> dict[str, str]:
        found = {".".join(map(str, path)): value for path, value in leaves(recipe)}
        return {
            name.removeprefix("stages."): json.dumps(value, sort_keys=True, default=str)
            for name, value in without_paths(found).items()
            if name.partition(".")[0] != "launch"
        }

    def shown(known: Mapping[str, str], name: str) -> str:
        return in_short(json.loads(known[name])) if name in known else "not there"

    own, other = values(here), values(there)
    return [
        f"{name} is {shown(own, name)} here, {shown(other, name)} {place}"
        for name in dict.fromkeys([*own, *other])
        if own.get(name) != other.get(name)
    ]


def without_paths(value: Any) -> Any:
    """A recipe's value with A_PATH for each path in it."""
    return mapped(value, lambda one: A_PATH if is_path(one) else one)


def is_path(value: Any) -> bool:
    """Whether a recipe's value is the path of a file or folder on one machine."""
    return isinstance(value, str) and value.startswith(("/", "~"))
