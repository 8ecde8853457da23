"""Everything that a stage must keep to, in one call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.contracts.signature import name_of
from pipeline.errors import PluginError
from pipeline.plan.registry import GROUP, Entry, Registry
from pipeline.testing.behaviour import acceptance, preset_faults, refusal
from pipeline.testing.declaration import field_violations, name_violations, run_violations

Fields = Mapping[str, Any]


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
    """What keeps the class from being a good stage, in words; nothing if it is one.

    `valid` are fields of a slot as a recipe would have them, without any mistake (by default none,
    which is right for a stage without required fields). `invalid` are pairs of fields with a
    mistake and the dotted key at which a problem must be reported.

    Looked at are the entry point, the class, `run`'s annotations, each field (documented, a type
    that a recipe can hold, a default within its bounds), its presets, what importing and checking
    it imports, and how good and bad fields are answered. `run` is not called.
    """
    pairs = list(invalid)
    entries = _entries(stage)
    found = [] if entries else [f"no entry point of the group `{GROUP}` leads to it"]
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
            yield from name_violations(stage, entry.name)
        yield from run_violations(stage)
        yield from field_violations(stage)
        yield from acceptance(stage, valid)
        yield from preset_faults(stage, entry.name)
        for key, fields in invalid:
            yield from refusal(stage, key, fields)
    except PluginError as error:
        yield str(error)
    yield from import_violations(entry.value, [valid, *(fields for _, fields in invalid)])


def _entries(stage: type) -> list[Entry]:
    """Installed entries that lead to the class. Only those that may are imported."""
    return [
        entry
        for entry in Registry.installed().entries()
        if entry.value.partition(":")[2] == stage.__qualname__ and _leads_to(entry, stage)
    ]


def _leads_to(entry: Entry, stage: type) -> bool:
    from importlib.metadata import EntryPoint

    try:
        return EntryPoint(entry.name, entry.value, GROUP).load() is stage
    except Exception:
        return False


def _unregistered(stage: type) -> Entry:
    value = f"{stage.__module__}:{stage.__qualname__}"
    package = stage.__module__.partition(".")[0]
    return Entry(
        name=stage.__qualname__, value=value, distribution=package, version="(not installed)"
    )


def import_violations(value: str, configs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What importing the stage at `value` (`module:Class`) and then checking slots of these fields
    imports too early."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.testing.behaviour"],
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
