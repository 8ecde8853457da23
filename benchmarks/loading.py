"""Measure how a model's weights come from its files into two ranks, side by side with other ways.

    python benchmarks/loading.py [--shape 1.5b|0.5b|small|tiny] [--repeats 5] [--dtypes bf16,fp32]

Safetensors with bf16 weights (random, made once) are loaded by two processes on the CPU, one thread
each, into bf16 and into fp32: as `wrap.fsdp`, `wrap.zero` (stage 3) and `wrap.ddp` load their
parameters, and in the ways that transformers, torch, accelerate and DeepSpeed have. Each load has
processes of its own, which load a tiny model first, so that all is imported; methods take turns.
Measured are seconds between barriers; the most memory that each rank took beyond what it had
before; the bytes that it asked the system to read; and, just before each load, `cat` of the same
files, which also brings them into the page cache. All must end with the same bits of one layer.
Exits 1 when one does not, or fails.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from apart.crew import Failed, Part, measure
from loaders import digest, files
from shapes import SHAPES, count, parameters
from tables import Rounds, listed, markdown, mib, ratio

from pipeline.hardware.host import free_memory

RANKS = 2
OURS = "ours"


class Method(NamedTuple):
    """A way to load. `needs` is bytes of memory for each parameter, on both ranks together, into
    bf16 and into fp32, with some room."""

    task: str
    needs: tuple[float, float]


METHODS: Mapping[str, Mapping[str, Method]] = {
    "fsdp": {
        OURS: Method("loaders.ours:fsdp", (2.5, 4.5)),
        "from_pretrained everywhere": Method("loaders.sharded:from_pretrained", (4.5, 8.5)),
        "rank 0 + broadcast": Method("loaders.sharded:rank_0_and_broadcast", (3.5, 5.5)),
        "DCP HuggingFaceStorageReader": Method("loaders.sharded:checkpoint_reader", (3.5, 5.5)),
        "accelerate ram-efficient": Method("loaders.sharded:accelerate", (5.5, 13.5)),
    },
    "zero3": {
        OURS: Method("loaders.ours:zero", (13.0, 18.0)),
        "zero.Init + from_pretrained": Method("loaders.partitioned:parameters", (6.5, 8.0)),
        "the same + initialize": Method("loaders.partitioned:engine", (15.0, 20.0)),
    },
    "ddp": {
        OURS: Method("loaders.ours:ddp", (4.5, 8.5)),
        "from_pretrained, left mapped": Method("loaders.replicated:mapped", (4.5, 8.5)),
        "from_pretrained everywhere": Method("loaders.replicated:from_pretrained", (4.5, 8.5)),
        "rank 0 + broadcast": Method("loaders.replicated:rank_0_and_broadcast", (4.5, 8.5)),
    },
}
DTYPES = ("bf16", "fp32")


class Load(NamedTuple):
    """One measured load, and `cat` just before it."""

    parts: Sequence[Part]
    cat: float

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return max(part.seconds for part in self.parts)


Key = tuple[str, str, str]
"""Dtype, strategy, method."""


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="1.5b", show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Rounds; one load of each in each.")
@click.option("--dtypes", default=",".join(DTYPES), show_default=True)
@click.option("--strategies", default=",".join(METHODS), show_default=True)
@click.option("--only", multiple=True, help="Methods whose names hold this, and ours; repeatable.")
@click.option("--parts", default=4, show_default=True, help="Weight files of the model.")
@click.option("--folder", type=click.Path(path_type=Path), help="For scratch; default: /tmp.")
@click.option("--model", type=click.Path(path_type=Path), help="Keep the model's files here.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
def main(
    shape: str, repeats: int, dtypes: str, strategies: str, only: tuple[str, ...], parts: int,
    folder: Path | None, model: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Make the files, load them in turns, print a Markdown table."""
    keys = chosen(dtypes, strategies, only)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        bench = Bench(SHAPES[shape], model or Path(scratch) / "model", Path(scratch), parts)
        for number in range(repeats):
            for key in turned(keys, number):
                bench.load(key, number)
    bench.show(keys)
    if json_file:
        json_file.write_text(json.dumps(bench.everything(), indent=1) + "\n", "utf-8")
    if bench.problems:
        sys.exit(1)


def chosen(dtypes: str, strategies: str, only: Sequence[str]) -> list[Key]:
    """All combinations that the options name. Raises click.UsageError."""
    keys = []
    for dtype in dtypes.split(","):
        for strategy in strategies.split(","):
            if dtype not in DTYPES or strategy not in METHODS:
                raise click.UsageError(
                    f"{dtype}, {strategy}: there are {', '.join([*DTYPES, *METHODS])}"
                )
            words = [OURS, *(only or [""])]
            names = [name for name in METHODS[strategy] if any(word in name for word in words)]
            keys += [(dtype, strategy, name) for name in names]
    return keys


def turned(keys: Sequence[Key], number: int) -> list[Key]:
    """Another one begins in every round."""
    first = number * max(len(keys) // 3, 1) % max(len(keys), 1)
    return [*keys[first:], *keys[:first]]


class Bench:
    """Loads, and keeps what came of it."""

    def __init__(self, config: Mapping[str, Any], model: Path, scratch: Path, parts: int) -> None:
        tiny = {"config": dict(SHAPES["tiny"]), "model": str(scratch / "tiny")}
        files.make(Path(tiny["model"]), tiny["config"], 1)
        self._job = {"config": dict(config), "model": str(model), "tiny": tiny}
        self._scratch = scratch
        self._files = files.make(model, config, parts)
        self._elements = count(parameters(config))
        self._expected = {dtype: digest.of_files(self._files, config, dtype) for dtype in DTYPES}
        self.loads: dict[Key, dict[int, Load]] = defaultdict(dict)
        self.problems: dict[Key, str] = {}
        self.skipped: dict[Key, str] = {}

    def load(self, key: Key, number: int) -> None:
        """One load in two new processes; a method that has failed is not tried again."""
        dtype, strategy, name = key
        method = METHODS[strategy][name]
        needs = method.needs[DTYPES.index(dtype)] * self._elements
        if needs > free_memory():
            self.skipped[key] = f"needs about {needs / 1e9:.0f} GB of memory"
        if key in self.problems or key in self.skipped:
            return
        click.echo(f"round {number + 1}: {' '.join(key)}", err=True)
        seconds: list[float] = []

        def prepare() -> None:
            cat(self._files)
            seconds.append(cat(self._files))

        job = {**self._job, "dtype": dtype, "task": method.task}
        try:
            found = measure(
                "apart.warmed:warmed", job, scratch=self._scratch, world=RANKS,
                env={"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
                before=prepare,
            )  # fmt: skip
        except Failed as error:
            self.problems[key] = str(error)
            return
        if any(part.found["digest"] != self._expected[dtype] for part in found):
            self.problems[key] = "ends with other numbers than those in the files"
        self.loads[key][number] = Load(found, *seconds)

    def seconds(self, key: Key) -> Rounds:
        """Of each round."""
        return {number: load.seconds for number, load in self.loads[key].items()}

    def show(self, keys: Sequence[Key]) -> None:
        """The table, and what went wrong."""
        head = [
            "into", "strategy", "method", "s, median (every round)", "ours / it", "it / cat",
            "anonymous memory beyond start, MiB, by rank", "resident", "read by calls, MiB",
        ]  # fmt: skip
        click.echo(markdown(head, [self._row(key) for key in keys]))
        for key, why in self.skipped.items():
            click.echo(f"\nskipped: {' '.join(key)}: {why}")
        for key, why in self.problems.items():
            click.echo(f"\nfailed: {' '.join(key)}: {why}")

    def _row(self, key: Key) -> list[str]:
        dtype, strategy, name = key
        loads = self.loads[key]
        ours = self.seconds((dtype, strategy, OURS))
        cats = {number: load.cat for number, load in loads.items()}
        return [
            dtype, strategy, name + self._fill(key), listed(self.seconds(key)),
            f"{ratio(ours, self.seconds(key)):.2f}",
            f"{ratio(self.seconds(key), cats):.2f}",
            by_rank(loads.values(), lambda part: part.grown.anon),
            by_rank(loads.values(), lambda part: part.grown.rss),
            by_rank(loads.values(), lambda part: part.read),
        ]  # fmt: skip

    def _fill(self, key: Key) -> str:
        """How much of the time the filling took, where that is only a part."""
        fills = [max(part.found.get("load_weights", 0.0) for part in load.parts)
                 for load in self.loads[key].values()]  # fmt: skip
        return f" (of which fill {statistics.median(fills):.2f} s)" if any(fills) else ""

    def everything(self) -> list[dict[str, Any]]:
        """All numbers, for JSON."""
        return [
            {
                "into": key[0], "strategy": key[1], "method": key[2], "round": number,
                "cat": load.cat, "ranks": [vars(part) for part in load.parts],
            }
            for key, loads in self.loads.items()
            for number, load in loads.items()
        ]  # fmt: skip


def by_rank(loads: Any, what: Any) -> str:
    """The largest of all rounds, for each rank: `1617 / 1616`."""
    ranks = zip(*([what(part) for part in load.parts] for load in loads), strict=True)
    return " / ".join(mib(max(values)) for values in ranks) or "-"


def cat(paths: Sequence[Path]) -> float:
    """Seconds to read the files and do nothing with them."""
    began = time.perf_counter()
    subprocess.run(["cat", *paths], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
