"""Tables of docs/results.md, each made from one raw file of `results/`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import raw
from gpu.page import mfu, ratio, step_seconds
from memories import DRAWN
from tables import markdown

from pipeline.utils.text import human

GIB = 1 << 30
MB = 1e6
FILES = {
    "first": "gpu-2026-11-27-first",
    "second": "gpu-2026-11-27-second",
    "nemo": "nemo-automodel-2026-06-12",
    "smollm": "smollm-2026-11-21",
    "overhead": "overhead-2026-11-28",
    "watching": "watching-2026-11-27",
    "start": "start-2026-11-27",
    "checkpoint": "checkpoint-2026-11-27",
    "export": "export-2026-11-22",
    "loading": "loading-2026-11-22",
    "tokenising": "tokenising-2026-11-27",
    "memory": "memory-2026-11-28",
    "allocations": "allocations-2026-11-28",
    "step_time": "step_time-2026-11-23",
    "head": "head-2026-11-27",
    "published": "published-2026-11-28",
    "any_to_any": "any_to_any-2026-11-21",
    "journey": "journey-2026-11-21",
    "soak": "soak-2026-11-25",
    "scale": "scale-2026-12-01",
}
"""Measurement -> the raw file that the page shows."""
SETTINGS = {
    "1b compiled": "1B, all weights, compiled",
    "8b lora compiled": "8B, LoRA, compiled",
    "8b lora fp8": "8B, LoRA, compiled, fp8",
}
"""Setting of benchmarks/gpu -> its name on the page."""
Row = Mapping[str, Any]


def rows(measurement: str) -> list[Row]:
    """Return the rows of a measurement's raw file."""
    found: list[Row] = raw.read(FILES[measurement])["rows"]
    return found


def gpu() -> str:
    """Speed and memory on the GPU, by run and setting."""
    found = []
    for name in ("first", "second"):
        for one in rows(name):
            seconds, against = step_seconds(one), ratio(one, "bare")
            assert seconds is not None
            found.append([
                name, SETTINGS[one["setting"]], f"{seconds:.3f}",
                f"{one['tokens'] / seconds:,.0f}", percent(mfu(one)),
                f"{one['peak']['allocated'] / GIB:.1f}",
                "" if against is None else f"{against:.3f}",
            ])  # fmt: skip
    head = ["run", "Llama 3 shape", "s a step", "tokens/s", "MFU", "GiB", "time / plain loop"]
    return markdown(head, found)


def smollm() -> str:
    """One fine-tune under seven strategies."""
    found = [
        [
            one["name"], f"{one['first_loss']:.5f}", f"{one['last_loss']:.5f}",
            f"{one['eval_loss']:.5f}", f"{one['loss_difference']:.1e}",
            f"{one['norm_difference']:.1e}",
        ]
        for one in rows("smollm")
    ]  # fmt: skip
    head = ["strategy", "first loss", "last loss", "held-out loss", "loss, largest difference"]
    return markdown([*head, "gradient norm, relative"], found)


def overhead() -> str:
    """Seconds of the training loop over a bare loop's, by strategy and number of processes."""
    cells: dict[str, dict[str, str]] = {}
    for one in rows("overhead"):
        strategy, processes, _ = one["configuration"].split()
        text = f"{one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
        cells.setdefault(strategy, {})[processes.removesuffix("p")] = text
    counts = sorted({count for found in cells.values() for count in found})
    lines = [[name, *(found.get(n, "") for n in counts)] for name, found in cells.items()]
    return markdown(["strategy", *(f"{n} process{'es' * (n != '1')}" for n in counts)], lines)


def start() -> str:
    """Seconds to the first step, next to a script's."""
    found = []
    for one in rows("start"):
        ratios = one["seconds_ratios"]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        found.append([one["strategy"], f"{one['ours']:.2f}", f"{one['script']:.2f}", spread])
    return markdown(["strategy", "`pipe run`, s", "script, s", "ratio"], found)


CHECKPOINT = {
    "training stands still, first save, ms": lambda one: f"{one['first_stall_seconds'] * 1e3:.1f}",
    "later saves, of one copy of the state": lambda one: f"{one['later_stall']:.2f}",
    "a step next to a save, of other steps": lambda one: f"{one['step']:.2f}",
    "on disk after, s": lambda one: f"{one['on_disk_seconds']:.2f}",
    "memory beyond the snapshot, MB a rank": lambda one: f"{one['memory'] / MB:.0f}",
    "memory of a load, MB a rank": lambda one: f"{one['load_memory'] / MB:.0f}",
    "the library's own save blocks, s": lambda one: _rival(one["rival_seconds"]),
    "memory of its load, MB a rank": lambda one: f"{one['rival_load_memory'] / MB:.0f}",
}


def _rival(seconds: Mapping[str, float]) -> str:
    blocking = [
        value for name, value in seconds.items() if not name.endswith((", done", ", first"))
    ]
    return " or ".join(f"{value:.2f}" for value in blocking)


def checkpoint() -> str:
    """The cost of a checkpoint, by wrap."""
    found = rows("checkpoint")
    lines = [[what, *(cell(one) for one in found)] for what, cell in CHECKPOINT.items()]
    return markdown(["", *(one["wrap"] for one in found)], lines)


def export() -> str:
    """Seconds to write a model's file, next to `cp` of a file of the same size."""
    tools: dict[tuple[str, str], dict[int, Row]] = {}
    for one in rows("export"):
        tools.setdefault((one["group"], one["tool"]), {})[one["round"]] = one
    found = []
    for (group, tool), runs in tools.items():
        copies = tools[group, "cp"]
        if tool != "cp":
            ratios = [runs[number]["written"] / copies[number]["written"] for number in runs]
            memory = max(one["anonymous_mib"] for one in runs.values())
            found.append([tool, f"{statistics.median(ratios):.2f}", f"{memory:,.0f}"])
    return markdown(["tool", "time / `cp`", "memory, MiB"], found)


def loading() -> str:
    """Seconds to load a model's file onto two ranks."""
    found = [
        [
            one["strategy"], one["tool"], f"{statistics.median(one['bf16_seconds']):.2f}",
            f"{statistics.median(one['fp32_seconds']):.2f}", f"{one['anonymous_mib']:,.0f}",
        ]
        for one in rows("loading")
    ]  # fmt: skip
    return markdown(["strategy", "loader", "bf16, s", "fp32, s", "memory, MiB a rank"], found)


def tokenising() -> str:
    """Seconds to tokenise, and ours over each other way's."""
    cases: dict[str, dict[str, list[float]]] = {}
    for one in rows("tokenising"):
        seconds = [each["seconds"] for each in one["rounds"]]
        cases.setdefault(one["case"], {})[one["way"]] = seconds
    found = []
    for case, ways in cases.items():
        ours, *others = ways.values()
        cells = [f"{statistics.median(ours):.2f}"]
        for other in others:
            each = statistics.median(a / b for a, b in zip(ours, other, strict=True))
            cells.append(f"{statistics.median(other):.2f} ({each:.2f})")
        found.append([case, *cells])
    names = [name for name in next(iter(cases.values())) if name != "ours"]
    return markdown(["", "ours, s", *(f"`{name}`, s (ours / it)" for name in names)], found)


def memory() -> str:
    """Errors of the memory that `pipe plan` says, by what it was compared with."""
    kinds: dict[str, list[float]] = {}
    for one in rows("memory"):
        if not one["case"].startswith(DRAWN):
            kinds.setdefault(one["table"], []).append(one["error"])
    random = raw.read(FILES["memory"])["random"]
    ranks = [one["error"] for one in rows("allocations")]
    found = [
        _errors("traces of well-known models", kinds["profiles"]),
        ["traces of random models", str(random["figures"]), "", percent(random["largest"])],
        _errors("real tensors of small models (against traces)", kinds["tensors"]),
        _errors("allocations of real ranks, phase by phase", ranks),
    ]
    return markdown(["compared with", "figures", "median error", "largest"], found)


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share as the page writes it: `51.4 %`."""
    return "" if share is None else f"{100 * share:.{digits}f} %"


def _errors(words: str, errors: Sequence[float]) -> list[str]:
    sizes = [abs(error) for error in errors]
    return [words, f"{len(sizes)}", percent(statistics.median(sizes), 2), percent(max(sizes))]


def published() -> str:
    """Plans over what others published, by source."""
    sources: dict[str, list[Row]] = {}
    for one in rows("published"):
        sources.setdefault(one["source"], []).append(one)
    found = [
        [source, _range(memory_ratios(runs)), _range(speed_ratios(runs))]
        for source, runs in sources.items()
    ]
    head = ["source", "memory: plan / published", "speed: plan / published"]
    return markdown(head, found)


def memory_ratios(runs: Iterable[Row]) -> list[float]:
    """Return the planned memory over the published, of the trainings that count."""
    sizes = [one["memory"] for one in runs if one.get("memory", {}).get("counted")]
    return [one["planned"] / one["published"] for one in sizes]


def speed_ratios(runs: Iterable[Row]) -> list[float]:
    """Return the expected speed over the published."""
    return [one["speed"]["expected"] / one["speed"]["published"] for one in runs if "speed" in one]


def _range(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    middle = statistics.median(ratios)
    return f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} runs)"


SCALE = {
    "nodes meet, and each look of node 0": "node 0 reads all states",
    "a stop of all nodes judged": "it judges a stop",
    "the run handed to all ranks": "ranks get the run",
    "a barrier of all ranks": "a barrier",
    "ranks agree on a checkpoint (first save)": "a first checkpoint's plan",
    "a rank opens a checkpoint": "opening one",
    "logs of all ranks begun": "logs",
    "the first failure of all found": "reports of failures",
    "a rank joins gloo's full mesh": "gloo's mesh",
    "a rank joins gloo's lazy mesh": "the same, lazy",
}
"""What scale.py has simulated -> its words on the page."""


def scale() -> str:
    """Seconds by the number of ranks, and bytes and messages of one."""
    found: dict[str, list[Row]] = {}
    for one in rows("scale"):
        found.setdefault(one["what"], []).append(one)
    counts = [f"{one['ranks']:,}" for one in found[next(iter(SCALE))]]
    lines = [
        [
            words, *(f"{one['seconds']:.2g}" for one in found[what]),
            _between(*(human(one["bytes"]) for one in found[what])),
            _between(*(f"{one['messages']:,}" for one in found[what])),
        ]
        for what, words in SCALE.items()
    ]  # fmt: skip
    return markdown(["seconds", *counts, "bytes a rank", "messages a rank"], lines)


def _between(*values: str) -> str:
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


TABLES = (
    gpu, smollm, overhead, start, checkpoint, export, loading, tokenising, memory, published,
    scale,
)  # fmt: skip
