"""Write a plugin package with one stage, its entry point and its test, which works as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from pipeline.chain.registry import Registry, kind_of
from pipeline.errors import UsageError

PLANNER = "planner"
TEMPLATES = Path(__file__).parent / "templates"
SECOND: dict[str, tuple[str, ...]] = {
    "adapter": ("source",),
    "data": (PLANNER,),
    "optimizer": ("rule", PLANNER),
    "wrap": ("engine",),
}
"""Kind of stage -> its further modules: a half that imports torch, and its planner."""
KINDS = {path.name.removesuffix(".py.j2") for path in TEMPLATES.glob("[!_]*.py.j2")}
OTHER = "after_export"
"""Template of kinds that have none: a stage that runs after an export."""
REFUSED = ("average", "precision", "train")
"""Kinds that have no template, and whose stages do not run after an export."""
_WORD = "[a-z](?:[a-z0-9_]*[a-z0-9])?"  # a distribution's name ends in a letter or digit
_NAME = re.compile(rf"{_WORD}\.{_WORD}")


class NewStage(NamedTuple):
    """A stage that does not exist yet. Templates read its fields."""

    name: str
    """As in recipes: `optimizer.sgd`."""
    kind: str
    template: str
    """Name of the template of its kind."""
    package: str
    """Name of the distribution: `pipetrain-optimizer-sgd`."""
    module: str
    """Name of the module: `pipetrain_optimizer_sgd`."""
    stage: str
    """Name of the class: `OptimizerSgd`."""
    planner: str
    """Entry point of its planner; empty if its kind has none."""


def new_stage(name: str) -> NewStage:
    """Return the stage of a name. Raises UsageError for a name that no stage can have, or that an
    installed one has, and for a kind that is not written."""
    kind = kind_of(name)
    if not _NAME.fullmatch(name):
        hint = "a kind, a dot and a word, as in optimizer.sgd"
        raise UsageError(f"`{name}` is not a stage name", hint=hint)
    if kind in REFUSED:
        message = f"there is no example of the kind `{kind}`"
        raise UsageError(message, hint="see docs/writing-a-stage.md")
    if name in Registry.installed():
        raise UsageError(f"a stage called {name} is installed already")
    template = kind if kind in KINDS else OTHER
    package = f"pipetrain-{name.replace('.', '-').replace('_', '-')}"
    module = package.replace("-", "_")
    stage = "".join(word.capitalize() for word in re.split(r"[._]", name))
    has_planner = PLANNER in SECOND.get(template, ())
    planner = f"{module}_{PLANNER}:{stage}Planner" if has_planner else ""
    return NewStage(name, kind, template, package, module, stage, planner)


def write_package(new: NewStage, folder: Path | None = None) -> list[Path]:
    """Write the package of a new stage into a folder that is not there yet, by default one with the
    package's name; return its files. Raises UsageError."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    target = folder or Path(new.package)
    if target.exists():
        raise UsageError(f"{target} is there already", hint="name another folder with --out")
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True
    )
    halves = SECOND.get(new.template, ())
    written = []
    for file, template in (
        ("pyproject.toml", "pyproject.toml"),
        ("README.md", "README.md"),
        (f"{new.module}.py", f"{new.template}.py"),
        *((f"{new.module}_{half}.py", f"_{new.kind}_{half}.py") for half in halves),
        (f"tests/test_{new.module}.py", f"_test_{new.template}.py"),
    ):
        path = target / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(environment.get_template(f"{template}.j2").render(new=new), "utf-8")
        written.append(path)
    return written
