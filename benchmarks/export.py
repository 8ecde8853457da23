"""Measure exports of a checkpoint to a model file, side by side with `cp` of the same bytes.

    python benchmarks/export.py [--shape 1.5b|0.5b|small|tiny] [--repeats 5] [--groups fsdp,zero3]

A training state (fp32 weights, Adam's moments, random numbers) is written as two ranks of FSDP and
of ZeRO-3 save it. Then programs take turns to make fp32 files of the weights: `consolidate.stream`
with `export.safetensors`, without and with the stage's proof, on 1 and on 2 processes, and `cp`.
Each run has its own processes, which export a tiny checkpoint first, so that all imports are done.
Its input is read just before (or evicted, with `--cache cold`). Measured are the seconds until all
is written and until it is flushed to disk, processor time, and each process's peak memory, over its
own baseline and over an interpreter that has imported nothing. Every output is compared with the
expected numbers, tensor by tensor. Exits 1 when an output is wrong or a program fails.

The inputs of a group are on disk at the same time: 43 GB for 1.5b, deleted before the next group.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import raw
from apart.crew import Failed, Part, bare, measure
from exporters import cache, plain
from exporters.tools import CP, GROUPS, INPUTS, RANKS, Tool, chosen, disk, inputs, label
from exporters.trained import trained
from shapes import SHAPES
from tables import Rounds, listed, markdown, median, mib, ratio

from pipeline.hardware.host import cores_each, free_memory

MARGIN = 1 << 30
"""Bytes of disk and memory that stay free."""


class Run(NamedTuple):
    """One run of a tool, and the time to read the same bytes from the page cache just before it."""

    parts: Sequence[Part]
    reading: float

    @property
    def written(self) -> float:
        """Seconds until the slowest process has written everything."""
        return max(part.found["written"] for part in self.parts)

    @property
    def flushed(self) -> float:
        """Seconds until everything is on disk."""
        return max(part.seconds for part in self.parts)


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="1.5b", show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Rounds; one run of each in each.")
@click.option("--groups", default=",".join(GROUPS), show_default=True)
@click.option("--only", multiple=True, help="Tools whose names hold this, and cp; can be repeated.")
@click.option("--cache", "state", type=click.Choice(["warm", "cold"]), default="warm")
@click.option("--folder", type=click.Path(path_type=Path), help="Disk to measure; default: /tmp.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
def main(
    shape: str, repeats: int, groups: str, only: tuple[str, ...], state: str, folder: Path | None,
    json_file: Path | None,
) -> None:  # fmt: skip
    """Make the inputs of each group, run its tools in turns, print a Markdown table."""
    everything, problems = [], 0
    for group in groups.split(","):
        if group not in GROUPS:
            raise click.UsageError(f"no group {group}; there are {', '.join(GROUPS)}")
        tools = chosen(GROUPS[group], only)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            bench = Bench(shape, tools, Path(scratch), cold=state == "cold")
            for number in range(repeats):
                for place in range(len(tools)):
                    bench.run(tools[(place + number * 3) % len(tools)], number)
            bench.show(group)
            everything += bench.everything(group)
            problems += len(bench.problems)
    if json_file:
        raw.write(json_file, "export", everything)
    if problems:
        sys.exit(1)


class Bench:
    """The inputs of a group, its tools' results, and their problems."""

    def __init__(self, shape: str, tools: Sequence[Tool], scratch: Path, *, cold: bool) -> None:
        self._config = dict(SHAPES[shape])
        self._tools = tools
        self._scratch = scratch
        self._cold = cold
        self.weights = trained(self._config).weight_bytes
        self._require_disk()
        self._bare = bare(scratch)
        self._needed = {name: self._make(name) for name in inputs(tools)}
        self._digests = plain.expected(self._config)
        self.runs: dict[Tool, dict[int, Run]] = {tool: {} for tool in tools}
        self.problems: dict[Tool, str] = {}
        self._skipped: dict[Tool, str] = {}

    def _require_disk(self) -> None:
        needs = disk(self._tools) * self.weights + MARGIN
        free = shutil.disk_usage(self._scratch).free
        if free < needs:
            raise click.ClickException(
                f"{self._scratch}: {needs / 1e9:.0f} GB needed, {free / 1e9:.0f} GB free"
            )

    def _require_memory(self, needs: float, what: str) -> None:
        size, free = needs * self.weights + MARGIN, free_memory()
        if size > free:
            raise click.ClickException(
                f"{what}: needs about {size / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free"
            )

    def _make(self, name: str) -> cache.Needed:
        """Write an input, and a tiny one of its kind; return the parts of files that a tool
        reads."""
        self._require_memory(INPUTS[name].needs, name)
        click.echo(f"making {name}", err=True)
        job = {**INPUTS[name].job, "task": INPUTS[name].task, "ranks": RANKS}
        tiny, job = (
            {**job, "config": config, "folder": str(self._folder(name, kind))}
            for kind, config in (("tiny", dict(SHAPES["tiny"])), ("input", self._config))
        )
        for each in (tiny, job):
            Path(each["folder"]).mkdir(parents=True)
        (made,) = measure("apart.warmed:warmed", {**job, "tiny": tiny}, scratch=self._scratch)
        return [(file, begin, end) for file, begin, end in made.found["needed"]]

    def _folder(self, name: str, kind: str) -> Path:
        return self._scratch / kind / name.replace(" ", "")

    def _input(self, name: str, kind: str) -> str:
        """Return the path that a tool is given."""
        folder = self._folder(name, kind)
        steps = sorted(folder.glob("step-*"))
        return str(steps[0] if steps else folder)

    def run(self, tool: Tool, number: int) -> None:
        """Run a tool once in new processes, unless it has failed before."""
        try:
            self._require_memory(tool.needs, label(tool))
        except click.ClickException as error:
            self._skipped[tool] = error.message
        if tool in self.problems or tool in self._skipped:
            return
        click.echo(f"round {number + 1}: {label(tool)}", err=True)
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            try:
                self.runs[tool][number] = self._measured(tool, Path(folder))
            except Failed as error:
                self.problems[tool] = str(error)
                return
            wrong = plain.wrong(Path(folder) / "out", self._digests)
        if wrong:
            self.problems[tool] = f"wrote something else in {len(wrong)} tensors: {wrong[:5]}"

    def _measured(self, tool: Tool, folder: Path) -> Run:
        jobs = {}
        for kind, config in (("input", self._config), ("tiny", dict(SHAPES["tiny"]))):
            out = folder / ("out" if kind == "input" else kind)
            out.mkdir()
            jobs[kind] = {
                "config": config, "input": self._input(tool.input, kind), "out": str(out),
            }  # fmt: skip
        needed = self._needed[tool.input]
        reading: list[float] = []

        def prepare() -> None:
            os.sync()  # finish writing the previous run's files before this one is timed
            cache.read(needed)
            reading.append(cache.read(needed))
            if self._cold:
                cache.evict(needed)

        job = {**jobs["input"], "tiny": jobs["tiny"], "task": tool.task}
        threads = cores_each(tool.processes)  # as the launcher of runs does
        found = measure(
            "apart.warmed:warmed", job, scratch=self._scratch, world=tool.processes,
            env={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)},
            before=prepare,
        )  # fmt: skip
        return Run(found, *reading)

    def show(self, group: str) -> None:
        """Print the table, and the problems."""
        kind = "evicted" if self._cold else "in the page cache"
        click.echo(f"\n{group}: {self.weights / 1e9:.2f} GB of weights, inputs {kind}\n")
        head = [
            "tool", "written, s (every round)", "flushed, s (every round)", "GB/s written",
            "written / cp", "flushed / cp flushed", "written / reading", "CPU s",
            "anonymous memory beyond idle, MiB, by process", "resident beyond idle",
            "anonymous beyond bare", "resident beyond bare",
        ]  # fmt: skip
        click.echo(markdown(head, [self._row(tool) for tool in self._tools]))
        for why in self._skipped.values():
            click.echo(f"\nskipped: {why}")
        for tool, why in self.problems.items():
            click.echo(f"\nfailed: {label(tool)}: {why}")

    def _row(self, tool: Tool) -> list[str]:
        cp = next(tool for tool in self._tools if tool.name == CP)
        written, flushed = self._seconds(tool, "written"), self._seconds(tool, "flushed")
        cpu = {n: sum(part.cpu for part in run.parts) for n, run in self.runs[tool].items()}
        return [
            label(tool), listed(written), listed(flushed),
            f"{self.weights / 1e9 / median(written):.2f}",
            f"{ratio(written, self._seconds(cp, 'written')):.2f}",
            f"{ratio(flushed, self._seconds(cp, 'flushed')):.2f}",
            f"{ratio(written, self._seconds(tool, 'reading')):.2f}",
            f"{median(cpu):.1f}" if tool.name != CP else "-",
            self._most(tool, lambda part: part.grown.anon),
            self._most(tool, lambda part: part.grown.rss),
            self._most(tool, lambda part: part.peak.anon - self._bare.anon),
            self._most(tool, lambda part: part.peak.rss - self._bare.rss),
        ]  # fmt: skip

    def _seconds(self, tool: Tool, what: str) -> Rounds:
        return {number: getattr(run, what) for number, run in self.runs[tool].items()}

    def _most(self, tool: Tool, what: Callable[[Part], int]) -> str:
        """Return the largest peak over all rounds, for each process."""
        runs = [[what(part) for part in run.parts] for run in self.runs[tool].values()]
        return " / ".join(mib(max(values)) for values in zip(*runs, strict=True)) or "-"

    def everything(self, group: str) -> list[dict[str, Any]]:
        """Return all numbers, for JSON."""
        return [
            {
                "group": group, "tool": label(tool), "round": number, "weights": self.weights,
                "reading": run.reading, "written": run.written, "flushed": run.flushed,
                "anonymous_mib": sum(part.grown.anon for part in run.parts) / (1 << 20),
                "bare": self._bare._asdict(),
                "processes": [vars(part) for part in run.parts],
            }
            for tool, runs in self.runs.items()
            for number, run in runs.items()
        ]  # fmt: skip


if __name__ == "__main__":
    main()
