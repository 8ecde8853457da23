"""Check everything that the contract asks of a stage, in one call."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.chain.entry_points import GROUP, Entry
from pipeline.chain.registry import Registry
from pipeline.contracts.signature import name_of
from pipeline.errors import PluginError
from pipeline.testing import violations
from pipeline.testing.helpers import problems

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
    pairs = list(invalid)
    entries = [entry for entry in Registry.installed().entries() if _leads_to(entry, stage)]
    found = [] if entries else [NO_ENTRY]
    for entry in entries or [_unregistered(stage)]:
        found += _violations(stage, entry, valid or {}, pairs)
    return list(dict.fromkeys(found))


def _violations(
    stage: type, entry: Entry, valid: Fields, invalid: list[tuple[str, Fields]]
) -> Iterator[str]:
    registry = Registry.installed()
    try:
        (registry if entry.name in registry else Registry([entry])).load(entry.name)
        if entry.name in registry:
            yield from violations.in_name(stage, entry.name)
        yield from violations.in_run(stage)
        yield from violations.in_fields(stage)
        yield from violations.with_valid(stage, valid)
        yield from violations.in_presets(stage, entry.name)
        for key, fields in invalid:
            yield from violations.with_invalid(stage, key, fields)
    except PluginError as error:
        yield str(error)
    yield from import_violations(entry.value, [valid, *(fields for _, fields in invalid)])


def _leads_to(entry: Entry, stage: type) -> bool:
    """Whether the entry is the class; it is imported only if it has the class's name."""
    from importlib.metadata import EntryPoint

    if entry.value.partition(":")[2] != stage.__qualname__:
        return False
    try:
        return EntryPoint(entry.name, entry.value, GROUP).load() is stage
    except Exception:
        return False


def _unregistered(stage: type) -> Entry:
    value = f"{stage.__module__}:{stage.__qualname__}"
    name, package = stage.__qualname__, stage.__module__.partition(".")[0]
    return Entry(name=name, value=value, distribution=package, version="(not installed)")


def import_violations(value: str, configs: Sequence[Fields]) -> Iterator[str]:
    """Heavy packages that are imported with the stage at `value` (`module:Class`), or while slots
    with the fields in `configs` are checked."""
    program = "from pipeline.testing.conformance import observe; observe()"
    done = subprocess.run(
        [sys.executable, "-c", program],
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
