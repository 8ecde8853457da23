"""The doors, from which authors of stages import. `python -m tests.pipeline.test_doors` writes the
surface anew."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.utils.packages import names_of

ROOT = Path(__file__).parents[2]
SURFACE = Path(__file__).with_name("surface.txt")
DOORS = (
    "pipeline",
    "pipeline.checkpoint",
    "pipeline.hardware",
    "pipeline.importing",
    "pipeline.planning",
    "pipeline.track",
    "pipeline.utils",
    "stages.checkpoint",
    "stages.consolidate",
    "stages.data",
    "stages.model",
    "stages.weights",
    "stages.wrap",
)


def names(door: str) -> list[str]:
    return sorted(names_of(str(importlib.import_module(door).__file__)))


def surface() -> Iterator[str]:
    """Return a line for each name of a door, each field of a class, and each public method."""
    for door in DOORS:
        for name in names(door):
            yield from _described(f"{door}.{name}", getattr(importlib.import_module(door), name))


def _described(name: str, given: object) -> Iterator[str]:
    if inspect.ismodule(given):
        for each, value in sorted(vars(given).items()):
            if inspect.isclass(value) and value.__module__ == given.__name__:
                yield from _described(f"{name}.{each}", value)
        return
    if not inspect.isclass(given):
        yield f"{name}{inspect.signature(given)}" if inspect.isfunction(given) else name
        return
    yield f"{name}({', '.join(base.__name__ for base in given.__bases__)})"
    if getattr(given, "_is_protocol", False):
        yield from (f"{name}.{field}: {kind}" for field, kind in given.__annotations__.items())
    if dataclasses.is_dataclass(given):
        for field in dataclasses.fields(given):
            yield f"{name}.{field.name}: {field.type}"
    for member, value in sorted(vars(given).items()):
        if inspect.isfunction(value) and not member.startswith("_"):
            yield re.sub(
                r"<function .*? at 0x\w+>", "...", f"{name}.{member}{inspect.signature(value)}"
            )


def test_the_surface_is_frozen() -> None:
    """A change of the surface concerns every plugin: note it in the changelog, then write it
    anew."""
    assert list(surface()) == SURFACE.read_text("utf-8").splitlines()


def test_the_guide_names_all_that_the_first_door_gives() -> None:
    guide = (ROOT / "docs" / "writing-a-stage.md").read_text("utf-8")
    table = guide.partition("## What to import")[2].partition("More modules to import from")[0]
    assert set(re.findall(r"`(\w+)`", table)) - {"pipeline"} == set(names("pipeline"))


@pytest.mark.parametrize("door", DOORS)
def test_every_name_is_resolved(door: str) -> None:
    module = importlib.import_module(door)
    for name in names(door):
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module '{door}' has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize("door", DOORS)
def test_every_name_is_listed_and_exported(door: str) -> None:
    module = importlib.import_module(door)
    assert dir(module) == list(module.__all__) == names(door)
    found: dict[str, object] = {}
    exec(f"from {door} import *", found)
    assert set(names(door)) <= found.keys()


def test_a_strict_type_checker_knows_every_name() -> None:
    """`import name as name` re-exports a name; without it `mypy --strict` refuses it."""
    for door in DOORS:
        tree = ast.parse(Path(str(importlib.import_module(door).__file__)).read_text("utf-8"))
        (block,) = (node.body for node in tree.body if isinstance(node, ast.If))
        for node in block:
            assert isinstance(node, ast.ImportFrom)
            assert all(alias.asname == alias.name for alias in node.names), door


@pytest.mark.parametrize("door", DOORS)
def test_no_name_is_that_of_a_module(door: str) -> None:
    """An imported module would hide a name that is the same."""
    folder = Path(str(importlib.import_module(door).__file__)).parent
    modules = {file.stem for file in folder.glob("*.py")} | {file.name for file in folder.iterdir()}
    assert modules.isdisjoint(names(door))


def test_importing_a_door_imports_nothing_else() -> None:
    code = (
        f"import sys; {'; '.join(f'import {door}' for door in DOORS)}\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('pipeline', 'stages'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted([*DOORS, "pipeline.utils.packages", "stages"])


def imports(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "pipeline":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if "pipeline" in alias.name)


@pytest.mark.parametrize("file", sorted((ROOT / "stages").rglob("*.py")), ids=str)
def test_built_in_stages_use_the_doors(file: Path) -> None:
    for module, name in imports(file):
        if f"{module}.{name}" in DOORS:
            continue
        assert module in DOORS, f"{file}: {module} is no door"
        assert name in names(module), f"{file}: {module} does not offer {name}"


if __name__ == "__main__":
    SURFACE.write_text("".join(f"{line}\n" for line in surface()), "utf-8")
