"""Measure training on one GPU: `python benchmarks/gpu --out FOLDER`.

Made for ten minutes on one GPU, from a plain checkout, without a network. Writes `results.json`
after each setting, and `results.md` from it, so a program that is cut short keeps what it has.
Settings come in the order of their weight; `--only` chooses. `--tiny` runs everything on a
processor with tiny shapes: numbers mean nothing then.
"""

from __future__ import annotations

import sys
from pathlib import Path

# This folder itself, which Python puts first, has modules with names of packages.
sys.path[:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import json
import multiprocessing
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from typing import Any

import click

from gpu import checkout
from gpu.page import page
from gpu.settings import LENGTH, SETTINGS, SHAPES, TINY, TINY_LENGTH, Setting, recipe, tiny

LEAST = 15.0
"""Seconds that have to be left for another setting."""
MOST = 150.0
"""Seconds that a setting gets."""
TESTS = 170.0
"""Seconds that the suite's GPU tests get."""
ROOM = 40 << 30
"""Bytes of memory's file system that the models need, to lie there."""
MEMORY = Path("/dev/shm")
PRELOADED = ["gpu.session", "gpu.ceilings", "gpu.models", "gpu.plans"]


@dataclass(kw_only=True)
class Measurement:
    """The settings, one after another, each in a process of its own."""

    out: Path
    work: Path
    """Folder of models and runs."""
    deadline: float
    small: bool
    processes: ForkServerContext
    results: dict[str, Any] = field(default_factory=lambda: {"settings": {}})

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
        if tests:
            self._keep("tests", gpu_tests(self._left(TESTS)))
        if not self.small:
            self._keep("device", self._json("ceilings", _ceilings, self.length))
        self._write_models({setting.shape for setting in settings})
        plans = self._start_plans(settings)
        for setting in settings:
            if self._left() < LEAST:
                break
            began = time.monotonic()
            found = self._measured(setting)
            found["seconds"] = time.monotonic() - began
            self.results["settings"][setting.name] = found
            self._keep("plans", _read(self.work / "plans.json"))
            click.echo(
                f"{setting.name}: {found['seconds']:.0f} s {found.get('error', '')}", err=True
            )
        plans.join(max(self._left(), 1.0))
        self._keep("plans", _read(self.work / "plans.json"))

    def _measured(self, setting: Setting) -> dict[str, Any]:
        from gpu.session import Job, main

        folder = self._folder(setting)
        job = Job(
            setting=setting, recipe=folder / "recipe.yaml", model=self.work / setting.shape,
            folder=folder, length=self.length, device=self.device,
        )  # fmt: skip
        why = self._call(main, job)
        result = _read(folder / "result.json")
        if not result:
            result = {"error": why, "output": _last_lines(folder / "output.txt")}
        elif "error" in result:
            result["output"] = _last_lines(folder / "output.txt")
        shutil.rmtree(folder / "run", ignore_errors=True)
        return result

    def _call(self, target: Callable[..., object], *arguments: Any) -> str:
        """Call in a process of its own; returns why it has not ended well, or nothing."""
        process = self.processes.Process(target=target, args=arguments)
        process.start()
        process.join(self._left(MOST))
        if process.is_alive():
            process.kill()
            process.join()
            return "cut short"
        return f"exit code {process.exitcode}" if process.exitcode else ""

    def _json(self, name: str, target: Callable[..., object], *arguments: Any) -> Any:
        file = self.work / f"{name}.json"
        why = self._call(target, file, *arguments)
        return _read(file) or {"error": why}

    def _folder(self, setting: Setting) -> Path:
        return self.work / setting.name.replace(" ", "-").replace(",", "")

    def _write_models(self, shapes: set[str]) -> None:
        from gpu.models import write_model

        for shape in sorted(shapes):
            config = SHAPES[shape] | (TINY if self.small else {})
            self._call(write_model, config, self.work / shape, self.device)

    def _start_plans(self, settings: Sequence[Setting]) -> Any:
        """Write all recipes, and start their planning beside the measurements."""
        from gpu.plans import plan_all

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
        name = self.results.get("device", {}).get("name")
        arguments = (recipes, name, self.work / "plans.json")
        process = self.processes.Process(target=plan_all, args=arguments, daemon=True)
        process.start()
        return process

    def _keep(self, name: str, found: Any) -> None:
        self.results[name] = found
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1), "utf-8")
        (self.out / "results.md").write_text(page(self.results), "utf-8")

    def _left(self, most: float = float("inf")) -> float:
        return min(self.deadline - time.monotonic(), most)


def _ceilings(file: Path, length: int) -> None:
    from gpu.ceilings import measure

    file.write_text(json.dumps(measure(length=length)), "utf-8")


def gpu_tests(seconds: float) -> dict[str, Any]:
    """Return the last lines of the suite's GPU tests, and how long they took."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-q", "-rfE"]
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [*command, "-m", "gpu", "tests/gpu"], cwd=checkout.ROOT, timeout=seconds,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        lines = ended.stdout.splitlines()
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        lines = [*said.decode(errors="replace").splitlines(), "cut short"]
    return {"seconds": time.monotonic() - began, "lines": lines[-40:]}


def _read(file: Path) -> dict[str, Any]:
    """Return a file's JSON; nothing if it is not there."""
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found


def _last_lines(file: Path) -> list[str]:
    return file.read_text("utf-8", "replace").splitlines()[-25:] if file.exists() else []


def chosen(only: Sequence[str]) -> Iterator[Setting]:
    """Yield the settings with one of some names, or all."""
    for setting in SETTINGS:
        if not only or setting.name in only:
            yield setting


@click.command(help=__doc__)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder of the results."
)
@click.option("--minutes", type=float, default=9.5, show_default=True, help="Time limit.")
@click.option("--only", multiple=True, help="Name of a setting; can be given again.")
@click.option("--tests/--no-tests", default=True, help="Run tests/gpu first.")
@click.option("--tiny", "small", is_flag=True, help="Tiny shapes on a processor.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder of models and runs.")
def main(
    out: Path, minutes: float, only: Sequence[str], tests: bool, small: bool, work: Path | None
) -> None:
    deadline = time.monotonic() + 60 * minutes
    unknown = set(only) - {setting.name for setting in SETTINGS}
    if unknown:
        names = ", ".join(setting.name for setting in SETTINGS)
        raise click.UsageError(f"no setting {sorted(unknown)[0]!r}; there are: {names}")
    settings = [tiny(one) if small else one for one in chosen(only)]
    out.mkdir(parents=True, exist_ok=True)
    place = MEMORY if work is None and _room(MEMORY) else work
    with tempfile.TemporaryDirectory(dir=place) as folder:
        checkout.declare(Path(folder) / "entry_points")
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(PRELOADED)
        measurement = Measurement(
            out=out, work=Path(folder), deadline=deadline, small=small, processes=processes
        )
        measurement.run(settings, tests=tests)
    click.echo((out / "results.md").read_text("utf-8"))


def _room(folder: Path) -> bool:
    return folder.is_dir() and shutil.disk_usage(folder).free > ROOM


if __name__ == "__main__":
    main()
