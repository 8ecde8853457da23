"""Write a plugin package with one stage, its entry point and its test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.chain.registry import Registry
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


@dataclass(frozen=True)
class NewStage:
    """A stage that does not exist yet, by its name: `optimizer.sgd`."""

    name: str

    def __post_init__(self) -> None:
        """Raise UsageError for a name that no stage can have, or that an installed one has, and for
        a kind that is not written."""
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"`{self.name}` is not a stage name",
                hint="a kind, a dot and a word, as in optimizer.sgd",
            )
        if self.kind in REFUSED:
            raise UsageError(
                f"there is no example of the kind `{self.kind}`", hint="see docs/writing-a-stage.md"
            )
        if self.name in Registry.installed():
            raise UsageError(f"a stage called {self.name} is installed already")

    @property
    def kind(self) -> str:
        """The part before the dot."""
        return self.name.partition(".")[0]

    @property
    def template(self) -> str:
        """Name of the template of its kind."""
        return self.kind if self.kind in KINDS else OTHER

    @property
    def package(self) -> str:
        """Name of the distribution: `pipetrain-optimizer-sgd`."""
        return f"pipetrain-{self.name.replace('.', '-').replace('_', '-')}"

    @property
    def module(self) -> str:
        """Name of the module: `pipetrain_optimizer_sgd`."""
        return self.package.replace("-", "_")

    @property
    def modules(self) -> dict[str, str]:
        """The package's modules, each with its template: the stage's, and the further ones of
        its kind."""
        halves = SECOND.get(self.template, ())
        further = {f"{self.module}_{half}": f"_{self.kind}_{half}" for half in halves}
        return {self.module: self.template, **further}

    @property
    def planner(self) -> str:
        """Entry point of its planner; empty if its kind has none."""
        has = PLANNER in SECOND.get(self.template, ())
        return f"{self.module}_{PLANNER}:{self.stage}Planner" if has else ""

    @property
    def stage(self) -> str:
        """Name of the class: `OptimizerSgd`."""
        return "".join(word.capitalize() for word in re.split(r"[._]", self.name))

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield the names of the package's files, and their contents."""
        environment = Environment(
            loader=FileSystemLoader(TEMPLATES),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
        )
        for template, file in (
            ("pyproject.toml.j2", "pyproject.toml"),
            ("README.md.j2", "README.md"),
            *((f"{template}.py.j2", f"{module}.py") for module, template in self.modules.items()),
            (f"_test_{self.template}.py.j2", f"tests/test_{self.module}.py"),
        ):
            yield file, environment.get_template(template).render(new=self)


def write_package(new: NewStage, folder: Path | None = None) -> list[Path]:
    """Write the package of a new stage into a folder that is not there yet, by default one with the
    package's name; returns its files. Raises UsageError."""
    target = folder or Path(new.package)
    if target.exists():
        raise UsageError(f"{target} is there already", hint="name another folder with --out")
    written = []
    for file, text in new.files():
        path = target / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        written.append(path)
    return written
