"""The settings, one after another, each in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import click

from gpu import checkout
from gpu.models import write_model
from gpu.page import page
from gpu.plans import plan_all
from gpu.session import Job, main
from gpu.settings import LENGTH, SHAPES, TINY, TINY_LENGTH, Setting, recipe

LEAST = 15.0
"""Seconds that have to be left for another setting."""
MOST = 150.0
"""Seconds that a setting gets."""
TESTS = 170.0
"""Seconds that the suite's GPU tests get."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A process that waits to be told to begin."""

    process: SpawnProcess
    go: Event

    def call(self, seconds: float) -> str:
        """Have it begin; returns why it has not ended well in time, or nothing."""
        self.go.set()
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            return "cut short"
        return f"exit code {self.process.exitcode}" if self.process.exitcode else ""


def _when_told(go: Event, target: Callable[..., object], *arguments: Any) -> None:
    go.wait()
    target(*arguments)


@dataclass(kw_only=True)
class Measurement:
    """A measurement of some settings, whose results grow."""

    out: Path
    work: Path
    """Folder of models and runs."""
    deadline: float
    small: bool
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
        """Measure all that the time allows."""
        shapes = dict.fromkeys(setting.shape for setting in settings)
        models = {shape: self._prepared(write_model, *self._model(shape)) for shape in shapes}
        for model in models.values():
            model.go.set()
        plans, following = self._start_plans(settings), self._start(settings[0])
        if tests:
            self._keep("tests", gpu_tests(self.out / "tests.txt", self._left(TESTS)))
        for setting, after in zip(settings, [*settings[1:], None], strict=True):
            models[setting.shape].process.join(self._left(MOST))
            if not any(model.process.is_alive() for model in models.values()):
                plans.go.set()
            if self._left() < LEAST:
                break
            prepared = following
            following = None if after is None else self._start(after)
            began = time.monotonic()
            found = self._measured(setting, prepared)
            found["seconds"] = time.monotonic() - began
            self.results["settings"][setting.name] = found
            self._keep("plans", _read(self.work / "plans.json"))
            why = found.get("error", "")
            click.echo(f"{setting.name}: {found['seconds']:.0f} s {why}", err=True)
        if not self.small and self._left() > LEAST:
            self._keep("device", self._json("ceilings", _ceilings, self.length))
        plans.process.join(max(self._left(), 1.0))
        self._keep("plans", _read(self.work / "plans.json"))

    def _prepared(self, target: Callable[..., object], *arguments: Any) -> Prepared:
        """A process that has imported everything, and waits to call `target`."""
        go = self.processes.Event()
        process = self.processes.Process(
            target=_when_told, args=(go, target, *arguments), daemon=True
        )
        process.start()
        return Prepared(process=process, go=go)

    def _start(self, setting: Setting) -> Prepared:
        folder = self._folder(setting)
        job = Job(
            setting=setting, recipe=folder / "recipe.yaml", model=self.work / setting.shape,
            folder=folder, length=self.length, device=self.device,
        )  # fmt: skip
        return self._prepared(main, job)

    def _measured(self, setting: Setting, prepared: Prepared) -> dict[str, Any]:
        folder = self._folder(setting)
        why = prepared.call(self._left(MOST))
        result = _read(folder / "result.json")
        if why:
            result.setdefault("error", why)
        if "error" in result:
            result["output"] = _last_lines(folder / "output.txt")
        shutil.rmtree(folder / "run", ignore_errors=True)
        return result

    def _json(self, name: str, target: Callable[..., object], *arguments: Any) -> Any:
        file = self.work / f"{name}.json"
        why = self._prepared(target, file, *arguments).call(self._left(MOST))
        return _read(file) or {"error": why}

    def _folder(self, setting: Setting) -> Path:
        return self.work / setting.name.replace(" ", "-").replace(",", "")

    def _model(self, shape: str) -> tuple[dict[str, Any], Path, str]:
        config = SHAPES[shape] | (TINY if self.small else {})
        return dict(config), self.work / shape, self.device

    def _start_plans(self, settings: Sequence[Setting]) -> Prepared:
        """Write all recipes; their planning waits for the models."""
        text = self.work / "text.txt"
        text.write_text("text\n", "utf-8")
        recipes = {}
        for setting in settings:
            folder = self._folder(setting)
            folder.mkdir()
            recipes[setting.name] = folder / "recipe.yaml"
            content = recipe(
                setting, model=str(self.work / setting.shape), text=str(text), length=self.length,
                device=self.device,
            )  # fmt: skip
            recipes[setting.name].write_text(json.dumps(content, indent=1), "utf-8")
        return self._prepared(plan_all, recipes, self.device, self.work / "plans.json")

    def _keep(self, name: str, found: Any) -> None:
        self.results[name] = found
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1), "utf-8")
        (self.out / "results.md").write_text(page(self.results), "utf-8")

    def _left(self, most: float = float("inf")) -> float:
        return min(self.deadline - time.monotonic(), most)


def _ceilings(file: Path, length: int) -> None:
    from gpu.ceilings import measure

    file.write_text(json.dumps(measure(length=length)), "utf-8")


def gpu_tests(output: Path, seconds: float) -> dict[str, Any]:
    """Run the suite's GPU tests; returns the last lines that they print, and how long they took."""
    options = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-n",
        "4",
        "--dist",
        "loadfile",
        "-q",
        "-rfE",
    ]
    command = [sys.executable, "-m", "pytest", *options, "-m", "gpu", "tests/gpu"]
    began, cut = time.monotonic(), []
    with output.open("wb") as file:
        try:
            subprocess.run(command, cwd=checkout.ROOT, timeout=seconds, stdout=file, stderr=file)
        except subprocess.TimeoutExpired:
            cut = ["cut short"]
    return {"seconds": time.monotonic() - began, "lines": [*_last_lines(output), *cut]}


def _read(file: Path) -> dict[str, Any]:
    """Return a file's JSON; nothing if it is not there."""
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found


def _last_lines(file: Path) -> list[str]:
    return file.read_text("utf-8", "replace").splitlines()[-25:] if file.exists() else []
