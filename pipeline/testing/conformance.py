"""Check everything that the contract asks of a stage, in one call; make and run a stage from a
slot's fields, without a recipe around them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import os
import subprocess
import sys
import typing
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from pipeline.chain.artifacts import wrong_artifact
from pipeline.chain.registry import GROUP, Entry, Registry, line_in
from pipeline.chain.wiring import SlotType, wired
from pipeline.contracts.engine import Engine
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.plan_view import PlanView
from pipeline.contracts.signature import (
    dataclasses_in,
    default_of,
    field_types,
    gives,
    init_fields,
    name_of,
    needs,
)
from pipeline.contracts.stage import Context
from pipeline.distributed.process_group import DistContext
from pipeline.errors import Location, PluginError, Problem
from pipeline.planning.planner import Planners, presets
from pipeline.recipe.fields import adapter, build, field_docs, plain_value
from pipeline.recipe.nodes import node_of

Fields = Mapping[str, Any]
HEAVY = {"torch", "transformers", "deepspeed", "accelerate"}
"""Packages that only `run` may import: they take seconds, and `pipe check` takes none."""
NO_ENTRY = (
    f"no entry point of the group `{GROUP}` leads to it "
    "(add it to pyproject.toml, then `pip install -e .` again)"
)


def assert_conforms(
    stage: type, *, valid: Fields | None = None, invalid: Iterable[tuple[str, Fields]] = ()
) -> None:
    """Raise AssertionError with every violation that `check_stage` finds, one a line."""
    found = check_stage(stage, valid=valid, invalid=invalid)
    if found:
        raise AssertionError(f"{name_of(stage)}:\n" + "\n".join(f"- {each}" for each in found))


def check_stage(
    stage: type, *, valid: Fields | None = None, invalid: Iterable[tuple[str, Fields]] = ()
) -> list[str]:
    """The violations of the stage contract by a class, in words; empty for a good stage.

    `valid` are fields of a slot as in a recipe, without any mistake; by default none, for a stage
    without required fields. `invalid` are pairs of a dotted key and fields with a mistake there,
    which a problem must report.

    Checked are the entry point, the class, `run`'s annotations, each field (documented, a type that
    a recipe can hold, a default within its bounds), presets, imports while importing and checking
    it, and the answers to valid and invalid fields. `run` is not called.
    """
    entries = []
    for entry in Registry.installed().entries():
        # imported only if it has the class's name
        with contextlib.suppress(Exception):
            if entry.value.partition(":")[2] == stage.__qualname__:
                point = EntryPoint(entry.name, entry.value, GROUP)
                entries += [entry] if point.load() is stage else []
    pairs, found = list(invalid), [] if entries else [NO_ENTRY]
    unregistered = Entry(
        name=stage.__qualname__, value=f"{stage.__module__}:{stage.__qualname__}",
        distribution=stage.__module__.partition(".")[0], version="(not installed)",
    )  # fmt: skip
    for entry in entries or [unregistered]:
        found += _violations(stage, entry, valid or {}, pairs)
    return list(dict.fromkeys(found))


def _violations(
    stage: type, entry: Entry, valid: Fields, invalid: list[tuple[str, Fields]]
) -> Iterator[str]:
    registry, name = Registry.installed(), entry.name
    kind, _, rest = name.partition(".")
    try:
        (registry if name in registry else Registry([entry])).load(name)
        if name in registry:
            if not all(part.isidentifier() and part.islower() for part in (kind, rest)):
                letters = "lower-case letters, digits and underscores"
                yield f"its name `{name}` is not kind.name in {letters}"
            if wrong := wrong_artifact(stage, name):
                yield wrong
        yield from _in_run(stage)
        yield from _in_fields(stage)
        yield from _with_valid(stage, valid)
        offered, given = presets(Planners.installed(), name), gives(stage)
        if offered and (given is None or not issubclass(given, Engine)):
            yield "has presets, which are for stages that give an Engine"
        for one, preset in offered.items():
            if found := make(stage, preset.fields)[1]:
                yield f"its preset `{one}` is refused: {_listed(found)}"
        for key, fields in invalid:
            made, found = make(stage, fields)
            if made is not None:
                found = yield from _checked(made)
            if not found:
                yield f"invalid fields are accepted: {dict(fields)!r}"
            elif all(problem.key != key for problem in found):
                yield f"{dict(fields)!r} has no problem at `{key}`, but: {_listed(found)}"
    except PluginError as error:
        yield str(error)
    yield from import_violations(entry.value, [valid, *(fields for _, fields in invalid)])


def _in_run(stage: Any) -> Iterator[str]:
    """`run(self, ctx: Context, ...)` takes artifacts by name and declares what it returns."""
    hints = typing.get_type_hints(stage.run)
    parameters = list(inspect.signature(stage.run).parameters.values())
    if len(parameters) < 2 or hints.get(parameters[1].name) is not Context:
        yield "run: the first parameter after `self` is not annotated with Context"
    for parameter in parameters[2:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            yield f"run: `{parameter.name}` cannot be given by name"
    taken = [(f"`{need.parameter}`", need.type) for need in needs(stage)]
    for what, kind in [*taken, ("its result", gives(stage))]:
        if kind is not None and kind.__module__ in ("builtins", "typing"):
            yield f"run: {what} is of the type {kind.__name__}, which says nothing of its role"


def _in_fields(stage: type) -> Iterator[str]:
    """Every field, at any depth, is documented and understood, and accepts its own default."""
    unfit: list[str] = []
    for prefix, kind in _nested(stage):
        docs = field_docs(kind)
        for name in (field.name for field in init_fields(kind) if field.name not in docs):
            unfit.append(f"field `{prefix}{name}` has no string under it that says what it is")
        for name, default in _defaults(kind).items():
            try:
                json.dumps(default)
            except TypeError as error:
                key = f"{prefix}{name}"
                unfit.append(f"the default of field `{key}` cannot be written in a recipe: {error}")
    try:
        adapter(stage).json_schema()
    except PluginError as error:
        unfit.append(str(error))
    except Exception as error:
        unfit.append(f"there is no JSON Schema of its fields: {error}")
    yield from unfit
    # Python does not hold a default to its field's bounds; a recipe with the default would be
    for prefix, kind in () if unfit else _nested(stage):
        defaults = _defaults(kind)
        for problem in make(kind, defaults)[1]:
            if problem.key.partition(".")[0] in defaults:
                key = f"{prefix}{problem.key}"
                yield f"the default of field `{key}` is refused: {problem.message}"


def _nested(stage: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """The class and the dataclasses in its fields, each with the prefix of its fields' keys."""
    yield prefix, stage
    for name, annotation in field_types(stage).items():
        for below in dataclasses_in(annotation):
            yield from _nested(below, f"{prefix}{name}.")


def _defaults(kind: type) -> dict[str, Any]:
    """Defaults as in a recipe, of the fields that have one."""
    found = {field.name: default_of(field) for field in init_fields(kind)}
    return {n: plain_value(v) for n, v in found.items() if v is not dataclasses.MISSING}


def _with_valid(stage: type, valid: Fields) -> Iterator[str]:
    """Valid fields are accepted, and values written out mean the same."""
    made, found = make(stage, valid)
    if made is None:
        yield f"valid fields are refused: {_listed(found)}"
        return
    if found := (yield from _checked(made)):
        yield f"check refuses valid fields: {_listed(found)}"
    try:  # the journal recognizes a finished stage by this
        json.dumps(dataclasses.asdict(made), sort_keys=True, default=os.fspath)
    except Exception as error:
        fit = "use numbers, text, paths, tuples and mappings of them"
        yield f"its values have no stable JSON form: {error} ({fit})"
        return
    again, found = make(stage, plain_value(made))  # as `pipe show` prints them
    if again is None:
        yield f"its values are refused when written out in full: {_listed(found)}"
    elif again != made:
        yield "is not equal to a stage of the same values"


def _checked(made: Any) -> Generator[str, None, list[Problem]]:
    """Yield the violations of `check`; return the problems that it finds."""
    try:
        found: list[Any] = list(checked(made))
    except Exception as error:
        line = line_in(error, type(made).__module__)
        at = f", at {line}" if line else ""
        yield f"check raised {type(error).__name__} instead of yielding a Problem: {error}{at}"
        return []
    for each in found:
        if not isinstance(each, Problem):
            yield f"check yields {type(each).__name__} instead of Problem"
    return [each for each in found if isinstance(each, Problem)]


def _listed(found: list[Problem]) -> str:
    return "; ".join(str(dataclasses.replace(each, location=None)) for each in found)


def import_violations(value: str, configs: Sequence[Fields]) -> Iterator[str]:
    """Heavy packages that are imported with the stage at `value` (`module:Class`), or while slots
    with the fields in `configs` are checked."""
    done = subprocess.run(
        [sys.executable, "-c", "from pipeline.testing.conformance import observe; observe()"],
        input=json.dumps({"value": value, "configs": list(configs)}),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield f"importing it in a fresh process failed: {last}"
        return
    for moment, names in json.loads(done.stdout.splitlines()[-1]).items():
        if names:
            yield f"{moment} imports {', '.join(names)} (import them inside run)"


def observe() -> None:
    """Print the heavy packages by the moment they are imported, for `import_violations`."""
    given = json.load(sys.stdin)
    before = HEAVY & sys.modules.keys()
    entry = Entry(name="the.stage", value=given["value"], distribution="the package", version="")
    try:
        stage = Registry([entry]).load(entry.name)
    except PluginError:  # a violation of its own
        given["configs"] = []
    imported = HEAVY & sys.modules.keys()
    for fields in given["configs"]:
        with contextlib.suppress(Exception):  # a violation of its own
            problems(stage, fields)
    then = HEAVY & sys.modules.keys() - imported
    moments = {"importing it": imported - before, "checking it": then}
    print(json.dumps({moment: sorted(names) for moment, names in moments.items()}))


def plan_view(
    slots: Mapping[str, Any] | None = None, *, procs: int = 1, device: str = "cpu"
) -> PlanView:
    """The argument of a stage's `check`: stages by slot, and how they will be launched."""
    given = slots or {}
    wires = wired([SlotType(slot=slot, use="", kind=type(each)) for slot, each in given.items()])
    return PlanView(name="test", seed=0, procs=procs, device=device, slots=given, wiring=wires)


def problems(
    stage: type, fields: Mapping[str, Any], *, plan: PlanView | None = None
) -> list[Problem]:
    """All problems of a slot with these fields, plain values as in a recipe.

    Each problem's `key` starts at a field. If no field is at fault, the stage's `check` is called
    with `plan`, by default one without other slots, to which the stage is added before the first
    slot that takes its result, or last. Raises whatever `check` raises, and PluginError
    if the stage's fields cannot be understood.
    """
    made, found = make(stage, fields)
    return found if made is None else checked(made, plan)


def make(stage: type, fields: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """The stage with these fields, or None and their problems."""
    tree = node_of(fields, Location(file="fields"))
    return build(stage, fields, tree=tree, path=())


def checked(made: Any, plan: PlanView | None = None) -> list[Problem]:
    """The problems that the stage's own `check` yields, if it has one."""
    if not hasattr(made, "check"):
        return []
    view = plan or plan_view()
    if not view.slot(made):
        slots, given = list(view.slots.items()), gives(type(made)) or object
        kinds: list[type] = [type(each) for _, each in slots]
        takes = [any(issubclass(given, need.type) for need in needs(kind)) for kind in kinds]
        at = takes.index(True) if any(takes) else len(slots)
        with_it = dict([*slots[:at], ("slot", made), *slots[at:]])
        view = dataclasses.replace(view, slots=with_it, wiring=plan_view(with_it).wiring)
    return list(made.check(view))


def context(run_dir: str | Path, *, seed: int = 0, dist: DistContext | None = None) -> Context:
    """The context of one CPU process without a process group, or of `dist`.

    `run_dir` is created if missing. Rank 0's metrics go to its `metrics.jsonl`, logs to the logger
    `pipe.testing`. Calls registered with `on_exit` are not made.
    """
    import torch

    place, folder = dist or DistContext(device=torch.device("cpu")), Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(folder / "metrics.jsonl" if place.is_main else None)
    log = logging.getLogger("pipe.testing")
    return Context(run_dir=folder, seed=seed, dist=place, log=log, metrics=metrics)
