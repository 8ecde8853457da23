"""Compare `pipe plan` with figures that others published about their trainings.

    python benchmarks/published.py [--only TEXT] [--json FILE]

Plans each training of `publications/runs.yaml` as a recipe, and prints a table of memory, measured
as in the source, and one of speed.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import raw
import yaml
from tables import markdown

from pipeline.hardware.gpus import GB, GIB
from pipeline.planning.forecast import BACKWARD, FORWARD, UPDATE
from pipeline.planning.hardware import HardwareOptions, Margins
from pipeline.planning.memory_plan import MemoryPlan, check, estimate_plan

RUNS = Path(__file__).parent / "publications" / "runs.yaml"
CLOSE = 0.15
SLOTS: Mapping[str, dict[str, Any]] = {
    "model": {"use": "model.hf"},
    "adapter": {"use": "adapter.lora"},
    "precision": {"use": "precision.policy"},
    "data": {"use": "data.text"},
    "optimizer": {"use": "optimizer.adamw"},
    "wrap": {"use": "wrap.fsdp"},
    "checkpoint": {"use": "checkpoint.sharded"},
    "train": {"use": "train.causal_lm", "steps": 1, "micro_batch_size": 1},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published training; `runs.yaml` explains its fields."""

    source: str
    run: str
    slots: Mapping[str, Mapping[str, Any]]
    """Slot -> its fields."""
    gpu: str
    gpus: int = 1
    nodes: int = 1
    interconnect: float | None = None
    accumulation: int = 1
    memory: str = ""
    measured: str = ""
    tokens: float | None = None
    counted: bool = True
    more: tuple[float, str] | None = None
    note: str = ""

    @property
    def name(self) -> list[str]:
        """Return the first cells of its rows."""
        return [self.source.split(",")[0], self.run, self._settings()]

    @property
    def published(self) -> float:
        """Return the published memory in bytes."""
        size, unit = self.memory.split()
        return float(size) * {"GB": GB, "GiB": GIB}[unit]

    @property
    def remark(self) -> str:
        """Return the explanation of a difference."""
        more = f"{self.more[0]:+.1f} GiB: {self.more[1]}" if self.more else ""
        return "; ".join(filter(None, [self.note, more]))

    def _settings(self) -> str:
        model, wrap, train = (self.slots[slot] for slot in ("model", "wrap", "train"))
        adapter = self.slots.get("adapter", {})
        said = [
            f"{wrap['use'].removeprefix('wrap.')} {wrap.get('stage', '')}".strip(),
            wrap.get("sharding"),
            "offloaded" if wrap.get("cpu_offload") else "",
            f"LoRA {adapter['rank']}" if adapter else "",
            adapter.get("quantize"),
            f"masters {self.slots['precision'].get('master', 'fp32')}",
            f"{self.accumulation} x {train['micro_batch_size']} samples",
            f"{self.slots['data']['sequence_length']} tokens",
        ]
        again = model.get("activation_checkpointing") or {}
        said += [f"recompute {name} {value}" for name, value in again.items()]
        return ", ".join(filter(None, said))

    def plan(self) -> MemoryPlan:
        """Return the plan of `pipe plan`."""
        machines = HardwareOptions(
            gpus=self.gpus, nodes=self.nodes, gpu=self.gpu, interconnect=self.interconnect
        )
        with tempfile.TemporaryDirectory() as folder:
            text, recipe = Path(folder) / "text.txt", Path(folder) / "recipe.yaml"
            text.write_text("text\n", "utf-8")
            recipe.write_text(yaml.safe_dump(self._recipe(text), sort_keys=False), "utf-8")
            return estimate_plan(check(recipe, [], machines), machines, Margins())

    def _recipe(self, text: Path) -> dict[str, Any]:
        stages = {slot: dict(stage) for slot, stage in self.slots.items()}
        if "path" in stages["model"]:
            stages["model"] |= {"init": "random"}
        stages["data"]["files"] = str(text)
        ranks, train = self.gpus * self.nodes, stages["train"]
        train["global_batch_size"] = train["micro_batch_size"] * self.accumulation * ranks
        return {"name": "published", "launch": {"procs": ranks, "device": "cuda"}, "stages": stages}


def runs() -> Iterator[Run]:
    """Yield all trainings of the file."""
    for group in yaml.safe_load(RUNS.read_text("utf-8")):
        for own in group["runs"]:
            given: dict[str, dict[str, Any]] = {}
            about: dict[str, Any] = {"source": group["source"]}
            for name, value in (group["all"] | own).items():
                slot, dot, field = name.partition(".")
                (given.setdefault(slot, {}) if dot else about)[field or name] = value
            slots = {slot: use | given.get(slot, {}) for slot, use in SLOTS.items()}
            if "adapter" not in given:
                del slots["adapter"]
            yield Run(**about, slots=slots)


def told(run: Run, plan: MemoryPlan) -> float:
    """Return the plan's bytes of a training step, measured as in the source."""
    device = plan.estimate.device
    tensors = max(device[phase].bytes for phase in (FORWARD, BACKWARD, UPDATE))
    whole = plan.margins.of(tensors)
    return {
        "allocated": tensors,
        "reserved": whole - plan.margins.overhead,
        "device": whole,
        "limit": whole,
        "states": device[UPDATE].bytes,
    }[run.measured]


Planned = Sequence[tuple[Run, MemoryPlan]]


def memory_table(planned: Planned, remarks: Mapping[str, str]) -> Iterator[str]:
    """Yield the table of memory on a GPU, and a line that counts the close plans."""
    rows, close = [], []
    for run, plan in planned:
        if not run.memory:
            continue
        found = told(run, plan)
        ratio = found / run.published
        if run.counted:
            close.append(ratio <= 1 if run.measured == "limit" else abs(ratio - 1) <= CLOSE)
        sizes = [f"{run.published / GIB:.1f}", f"{found / GIB:.1f}", f"{ratio:.2f}"]
        more = f"{(found + run.more[0] * GIB) / run.published:.2f}" if run.more else ""
        counted = "yes" if run.counted else "no"
        rows.append([*run.name, run.measured, *sizes, more, counted, remarks[run.remark]])
    head = ["source", "training", "settings", "measured", "published, GiB", "plan, GiB", "ratio"]
    yield markdown([*head, "with more", "counted", "remark"], rows)
    yield f"\nwithin {CLOSE:.0%}: {sum(close)} of {len(close)} that are counted\n"


def speed_table(planned: Planned, remarks: Mapping[str, str]) -> Iterator[str]:
    """Yield the table of tokens a second on a GPU, and the model's operations against its peak
    (MFU)."""
    rows, ratios = [], []
    for run, plan in planned:
        speed = plan.speed
        if run.tokens is None or speed is None or speed.mfu is None:
            continue
        expected = speed.tokens_per_second / plan.topology.ranks
        ratio = expected / run.tokens
        ratios.append(ratio)
        speeds = [f"{run.tokens:.0f}", f"{expected:.0f}", f"{ratio:.2f}"]
        used = [f"{speed.mfu / ratio:.0%}", f"{speed.mfu:.0%}", remarks[run.remark]]
        rows.append([*run.name, f"{plan.topology.ranks} x {run.gpu}", *speeds, *used])
    head = ["source", "training", "settings", "on", "published, tokens/s a GPU", "expected"]
    yield markdown([*head, "ratio", "MFU, published", "MFU, expected", "remark"], rows)
    if ratios:
        middle, near = statistics.median(ratios), sum(abs(ratio - 1) <= 0.2 for ratio in ratios)
        yield f"\nratio: median {middle:.2f}, within 20%: {near} of {len(ratios)}\n"


def row(run: Run, plan: MemoryPlan) -> dict[str, Any]:
    """Return both comparisons of a training as a row of the JSON file; sizes in bytes."""
    found: dict[str, Any] = {"source": run.name[0], "run": run.run, "settings": run.name[2]}
    found |= {"gpus": f"{plan.topology.ranks} x {run.gpu}", "remark": run.remark}
    if run.memory:
        planned = told(run, plan)
        more = planned + run.more[0] * GIB if run.more else None
        found["memory"] = {
            "measured": run.measured, "published": run.published, "planned": planned,
            "with_more": more, "counted": run.counted,
        }  # fmt: skip
    if run.tokens is not None and plan.speed is not None:
        expected = plan.speed.tokens_per_second / plan.topology.ranks
        found["speed"] = {"published": run.tokens, "expected": expected, "mfu": plan.speed.mfu}
    return found


@click.command()
@click.option("--only", default="", help="Trainings whose source or name has this text.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
def main(only: str, json_file: Path | None) -> None:
    """Plan, and print the tables."""
    planned = []
    for run in runs():
        if only.lower() in f"{run.source} {run.run}".lower():
            click.echo(f"{run.source}: {run.run} ...", err=True)
            planned.append((run, run.plan()))
    if json_file:
        raw.write(json_file, "published", [row(run, plan) for run, plan in planned])
    said = dict.fromkeys(run.remark for run, _ in planned if run.remark)
    remarks = {"": ""} | {remark: str(number) for number, remark in enumerate(said, 1)}
    for table in (memory_table, speed_table):
        click.echo("\n".join(table(planned, remarks)))
    for remark in said:
        click.echo(f"{remarks[remark]}. {remark}")


if __name__ == "__main__":
    main()
