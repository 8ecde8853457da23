"""The settings, one after another, each in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import click
import raw

from gpu.ceilings import measure
from gpu.models import write_model
from gpu.page import page
from gpu.plans import plan_all
from gpu.processes import Prepared, prepared
from gpu.session import Job, main
from gpu.settings import FEW, LENGTH, SHAPES, TINY, TINY_LENGTH, Setting, recipe, warming
from gpu.suite import gpu_tests, last_lines

LEAST = 15.0
"""Seconds that have to be left for another setting."""
MOST = 150.0
"""Seconds that a setting gets."""
WARM = 75.0
"""Seconds in which blocks are compiled ahead."""
TESTS = 170.0
"""Seconds that the suite's GPU tests get."""


@dataclass(kw_only=True)
class Measurement:
    """A measurement of some settings, whose results grow."""

    out: Path
    work: Path
    """Folder of models and runs."""
    deadline: float
    small: bool
    ahead: bool
    """Whether the blocks of all settings are compiled at the same time, first of all."""
    results: dict[str, Any] = field(default_factory=lambda: {"settings": {}})
    processes: SpawnContext = field(
        default_factory=lambda: multiprocessing.get_context("spawn"), init=False
    )
    """Libraries ask for the GPU when they are imported, and a process that has may not fork."""

    @property
    def device(self) -> str:
        """Return `cuda`, or `cpu` for tiny shapes."""
        return "cpu" if self.small else "cuda"

    @property
    def length(self) -> int:
        """Return the tokens of a sample."""
        return TINY_LENGTH if self.small else LENGTH

    def run(self, settings: Sequence[Setting], *, tests: bool) -> None:
        """Measure all that the time allows: speed first, one setting after another."""
        models = self._write_models(settings)
        plans = self._start_plans(settings)
        timed = [setting for setting in settings if not setting.memory]
        following = self._start(timed[0]) if timed else None
        if tests:
            self._keep("tests", gpu_tests(self.out / "tests.txt", self._left(TESTS)))
        if self.ahead:
            self._warm([setting for setting in timed if setting.compiled], models)
        for setting, after in zip(timed, [*timed[1:], None], strict=True):
            models[setting.shape].process.join(self._left(MOST))
            if not any(model.process.is_alive() for model in models.values()):
                plans.go.set()
            if self._left() < LEAST or following is None:
                break
            current = following
            following = None if after is None else self._start(after)
            self._measure([setting], [current])
            self._keep("plans", _read(self.work / "plans.json"))
        rest = [one for one in settings if one.memory]
        for start in range(0, len(rest), 2):
            two = rest[start : start + 2]
            if self._left() > LEAST:
                self._measure(two, [self._start(setting) for setting in two])
        if not self.small and self._left() > LEAST:
            self._keep("device", self._json("ceilings", measure, self.length))
        plans.go.set()
        plans.process.join(max(self._left(), 1.0))
        self._keep("plans", _read(self.work / "plans.json"))

    def _warm(self, settings: Sequence[Setting], models: Mapping[str, Prepared]) -> None:
        """Have torch compile the blocks of all settings, at the same time, for small models."""
        began, started = time.monotonic(), []
        for setting in settings:
            folder = self._folder(setting, "warm ")
            folder.mkdir()
            small = f"{setting.shape} small"
            models[small].process.join(self._left(MOST))
            self._write_recipe(setting, folder, self.work / small)
            job = Job(
                setting=warming(setting), recipe=folder / "recipe.yaml",
                model=self.work / small, folder=folder, length=self.length, device=self.device,
            )  # fmt: skip
            started.append(self._prepared(main, job))
            started[-1].go.set()
        for one in started:
            one.call(self._left(WARM))
        self._keep("compiled_ahead_seconds", time.monotonic() - began)

    def _measure(self, settings: Sequence[Setting], waiting: Sequence[Prepared]) -> None:
        began = time.monotonic()
        for one in waiting:
            one.go.set()
        for setting, one in zip(settings, waiting, strict=True):
            found = self._measured(setting, one)
            found["seconds"] = time.monotonic() - began
            self._keep("settings", self.results["settings"] | {setting.name: found})
            why = found.get("error", "")
            click.echo(f"{setting.name}: {found['seconds']:.0f} s {why}", err=True)

    def _prepared(self, target: Callable[..., object], *arguments: Any) -> Prepared:
        return prepared(self.processes, target, *arguments)

    def _start(self, setting: Setting) -> Prepared:
        folder = self._folder(setting)
        job = Job(
            setting=setting, recipe=folder / "recipe.yaml", model=self.work / setting.shape,
            folder=folder, length=self.length, device=self.device,
        )  # fmt: skip
        return self._prepared(main, job)

    def _measured(self, setting: Setting, one: Prepared) -> dict[str, Any]:
        folder = self._folder(setting)
        why = one.call(self._left(MOST))
        result = _read(folder / "result.json")
        if why:
            result.setdefault("error", why)
        if "error" in result:
            result["output"] = last_lines(folder / "output.txt")
        shutil.rmtree(folder / "run", ignore_errors=True)
        return result

    def _json(self, name: str, target: Callable[..., object], *arguments: Any) -> Any:
        file = self.work / f"{name}.json"
        why = self._prepared(target, file, *arguments).call(self._left(MOST))
        return _read(file) or {"error": why}

    def _folder(self, setting: Setting, before: str = "") -> Path:
        return self.work / (before + setting.name).replace(" ", "-").replace(",", "")

    def _write_models(self, settings: Sequence[Setting]) -> dict[str, Prepared]:
        """Start to write the models of all shapes; small ones too, to compile ahead for."""
        tiny = TINY if self.small else {}
        sizes = {setting.shape: tiny for setting in settings}
        if self.ahead:
            shapes = {setting.shape for setting in settings if setting.compiled}
            sizes = {f"{shape} small": tiny or FEW for shape in sorted(shapes)} | sizes
        models = {}
        for name, size in sizes.items():
            config = dict(SHAPES[name.partition(" ")[0]] | size)
            models[name] = self._prepared(write_model, config, self.work / name, self.device)
            models[name].go.set()
        return models

    def _start_plans(self, settings: Sequence[Setting]) -> Prepared:
        """Write all recipes; their planning waits for the models."""
        text = self.work / "text.txt"
        text.write_text("text\n", "utf-8")
        recipes = {}
        for setting in settings:
            folder = self._folder(setting)
            folder.mkdir()
            model = self.work / setting.shape
            recipes[setting.name] = self._write_recipe(setting, folder, model)
        return self._prepared(plan_all, recipes, self.device, self.work / "plans.json")

    def _write_recipe(self, setting: Setting, folder: Path, model: Path) -> Path:
        content = recipe(
            setting, model=str(model), text=str(self.work / "text.txt"), length=self.length,
            device=self.device,
        )  # fmt: skip
        file = folder / "recipe.yaml"
        file.write_text(json.dumps(content, indent=1), "utf-8")
        return file

    def _keep(self, name: str, found: Any) -> None:
        self.results[name] = found
        rows = [{"setting": name, **one} for name, one in self.results["settings"].items()]
        rest = {name: one for name, one in self.results.items() if name != "settings"}
        raw.write(self.out / "results.json", "gpu", rows, **rest)
        (self.out / "results.md").write_text(page(self.results), "utf-8")

    def _left(self, most: float = float("inf")) -> float:
        return min(self.deadline - time.monotonic(), most)


def _read(file: Path) -> dict[str, Any]:
    """Return a file's JSON; nothing if it is not there."""
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found
