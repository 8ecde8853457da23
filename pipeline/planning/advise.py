"""From a model and machines to a recipe that fits them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import RecipeError, UsageError
from pipeline.planning.draft import Draft
from pipeline.planning.hardware import Asked
from pipeline.planning.margins import Margins
from pipeline.planning.memory_plan import MemoryPlan, draw_up
from pipeline.planning.planner import Tier
from pipeline.planning.report import gib
from pipeline.planning.search import Change, Draw, ways
from pipeline.planning.strategies import WRAP, Tried, Walk, of_each, wrapped
from pipeline.presets import in_order
from pipeline.registry import Registry

MOST_NODES = 512
"""How far `more GPUs` is looked for."""


BATCH = 64
"""Samples of a step, where nothing is said."""
TOKENS = 32768
"""Of a forward pass on one GPU, where nothing is said: enough to keep it busy."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be trained."""

    name: str
    model: dict[str, Any]
    """Fields of the model slot."""
    data: Path
    lora: bool
    sequence: int
    global_batch: int | None
    """Samples of a step; None: BATCH, or one for each GPU."""
    micro_batch: int | None
    """Samples of a forward pass, to begin with; None: what makes TOKENS."""
    compute: str


def ranks_of(asked: Asked, nodes: int) -> int:
    """GPUs of so many nodes."""
    return (asked.gpus or 1) * nodes


def batch_of(task: Task, ranks: int) -> int:
    """Samples of a step on so many GPUs."""
    return task.global_batch or max(BATCH, ranks)


def draft_of(task: Task, asked: Asked, registry: Registry) -> Draft:
    """The recipe before a strategy is chosen. Raises UsageError when none is installed."""
    strategies = in_order(registry)
    if not strategies:
        raise UsageError("no installed stage offers a strategy")
    ranks = ranks_of(asked, asked.nodes or 1)
    batch = batch_of(task, ranks)
    most = task.micro_batch or max(TOKENS // task.sequence, 1)
    adapter = {"adapter": {"use": "adapter.lora", "rank": 16, "alpha": 32}} if task.lora else {}
    slots: dict[str, dict[str, Any]] = {
        "model": {"use": "model.hf", **task.model},
        **adapter,
        "precision": {"use": "precision.policy", "compute": task.compute},
        "data": {
            "use": "data.chat",
            "files": str(task.data.absolute()),
            "sequence_length": task.sequence,
            "heldout_fraction": 0.02,
        },
        "optimizer": {
            "use": "optimizer.adamw",
            "lr": 1e-4 if task.lora else 1e-5,
            "weight_decay": 0.0 if task.lora else 0.1,
            "warmup_ratio": 0.03,
        },
        "wrap": strategies[0].slot,
        "checkpoint": {"use": "checkpoint.sharded", "every": 200, "keep": 2},
        "train": {
            "use": "train.causal_lm",
            "epochs": 1,
            "global_batch_size": batch,
            "micro_batch_size": min(most, -(-batch // ranks)),
        },
        "consolidate": {"use": "consolidate.stream"},
        "export": {"use": "export.safetensors", "dtype": "bf16"},
    }
    return Draft(
        head=[],
        top={"name": task.name, "seed": 0, "launch": {"procs": ranks, "device": "cuda"}},
        slots=slots,
        reasons={},
    )


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What came of it."""

    draft: Draft | None
    """None: nothing fits."""
    chosen: Tried | None
    tried: Sequence[Tried]
    refused: Sequence[str]
    """What could not be tried here, and why."""
    nodes_needed: int | None
    """The fewest nodes on which it fits without offloading, of those that were asked about; None
    where that is not known, or not needed."""

    @property
    def missing(self) -> str:
        """What it takes where nothing fits, by the way that is the nearest to it."""
        hosts = [
            one for one in self.tried if all(short.place == "host" for short in one.way.drawn.short)
        ]
        if not hosts:
            return "more or larger GPUs; tensor parallelism is not there"
        least = min(hosts, key=lambda one: one.way.drawn.estimate.host_peak)
        needed = gib(least.way.drawn.estimate.host_peak)
        return f"{needed} GiB of host memory a node for {least.strategy.name}, or more nodes"

    def lines(self) -> Iterator[str]:
        """For people."""
        for tried in self.tried:
            fits = "fits    " if tried.way.fits else "too much"
            mark = "chosen  " if tried is self.chosen else fits
            yield f"{mark}  {tried.what}"
            yield f"          {tried.told()}"
        for refused in self.refused:
            yield f"refused   {refused}"
        if self.nodes_needed is not None:
            yield f"without offloading it would fit on {self.nodes_needed} nodes"


def advise(task: Task, asked: Asked, margins: Margins, registry: Registry) -> Advice:
    """Walk the decision order. Raises PipeError for what cannot be planned at all."""
    draft = draft_of(task, asked, registry)
    nodes = asked.nodes or 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(draft.text(), "utf-8")

        def draw(nodes: int, changes: Sequence[Change]) -> MemoryPlan:
            batch = f"train.global_batch_size={batch_of(task, ranks_of(asked, nodes))}"
            overrides = [batch, *(change.override for change in changes)]
            return draw_up(file, overrides, replace(asked, nodes=nodes), margins, registry)

        _require_sound(partial(draw, nodes))
        walk = Walk(
            draw=partial(draw, nodes),
            strategies=in_order(registry),
            nodes=nodes,
            ranks=ranks_of(asked, nodes),
        )
        chosen = walk.run()
        needed = None
        if chosen is None or chosen.strategy.order >= Tier.OFFLOADED:
            needed = _nodes(walk, draw)
    final = None
    if chosen is not None:
        head = _head(task, walk.tried, chosen)
        final = replace(draft, head=head).changed(chosen.way.changes)
    return Advice(
        draft=final,
        chosen=chosen,
        tried=walk.tried,
        refused=walk.refused,
        nodes_needed=needed,
    )


def _require_sound(draw: Draw) -> None:
    """Raises UsageError for mistakes that are no strategy's: a model or data that is not there."""
    try:
        draw([])
    except RecipeError as error:
        own = [one for one in error.problems if one.key.split(".")[0] != WRAP]
        if own:
            raise UsageError("; ".join(one.message for one in own), hint=own[0].hint) from error


DrawOn = Callable[[int, Sequence[Change]], MemoryPlan]
"""Nodes, changes -> the plan. Raises PipeError."""


def _nodes(walk: Walk, draw: DrawOn) -> int | None:
    """The fewest nodes, doubling, on which a strategy without offloading fits, with a sample for
    each GPU."""
    sharded = [named for named in walk.strategies if named.order == Tier.SHARDED]
    nodes = walk.nodes * 2
    while nodes <= MOST_NODES:
        more = partial(draw, nodes)
        try:
            found = [way for named in sharded for way in ways([wrapped(named)], more)]
            if any(way.fits and not way.drawn.idle for way in found):
                return nodes
        except RecipeError:  # such as a batch that is smaller than the ranks
            return None
        nodes *= 2
    return None


def _head(task: Task, tried: Sequence[Tried], chosen: Tried) -> list[str]:
    what = "low-rank updates" if task.lora else "all weights"
    lines = [f"{task.name}: {what} of {task.model.get('path') or 'a model'}.", ""]
    lines.append(f"Chosen: {chosen.what}: {chosen.told()}.")
    rest = [one for one in of_each(tried) if one.strategy is not chosen.strategy]
    for title, fits in (("Needs too much:", False), ("Fits too:", True)):
        others = [one for one in rest if one.way.fits is fits]
        if others:
            lines += ["", title, *(f"  {one.what}: {one.told()}" for one in others)]
    return lines
