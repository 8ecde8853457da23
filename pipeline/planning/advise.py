"""From a model and machines to a recipe that fits them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.errors import RecipeError, UsageError
from pipeline.planning.draft import WRAP, Task, drafted, on_cpu
from pipeline.planning.hardware import Asked, site_of
from pipeline.planning.margins import Margins
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.planner import Tier
from pipeline.planning.report import gib
from pipeline.planning.search import Base, Way
from pipeline.planning.strategies import (
    MOST_NODES,
    Candidate,
    choose,
    on_more_nodes,
    suited,
    wrapped,
)
from pipeline.planning.topology import Topology
from pipeline.presets import Strategy, in_order
from pipeline.registry import Registry

SLOW = 2
"""How many times as long as all else of a step the network may take before it is warned of."""


def advise(
    task: Task, asked: Asked, margins: Margins, registry: Registry
) -> tuple[str | None, list[str]]:
    """The recipe under the best strategy, with as little saved as it needs, or None where nothing
    fits; and lines for people: the choice, its reasons, what else there is. Raises PipeError for
    what cannot be planned at all."""
    strategies = in_order(registry)
    if not strategies:
        raise UsageError("no installed stage offers a strategy")
    topology = site_of(asked, asked.procs or 1, "cpu" if on_cpu(asked) else "cuda")
    known = [*suited(strategies, topology)]
    with tempfile.TemporaryDirectory() as folder:
        file, low_rank = Path(folder) / "recipe.yaml", Path(folder) / "low_rank.yaml"
        wrap = wrapped(strategies[0], WRAP)
        file.write_text(drafted(task, asked, wrap), "utf-8")
        low_rank.write_text(drafted(replace(task, lora=True), asked, wrap), "utf-8")
        base = Base(recipe=file, asked=asked, margins=margins, registry=registry)
        _require_sound(base)
        tried, refused = choose(base, known, WRAP)
        if not tried:
            raise UsageError("\n".join(["no strategy can be planned", *refused]))
        chosen, fits = tried[0], tried[0].way.fits
        on_gpus = fits and chosen.strategy.order < Tier.OFFLOADED
        notes = [*_warnings(chosen.way.drawn)] if fits else []
        if topology.device != "cpu" and not (on_gpus and not chosen.way.narrow):
            notes += _more_nodes(task, base, topology, strategies)
        if not task.lora and not on_gpus:
            notes += _low_rank(replace(base, recipe=low_rank), known)
    rest = [*notes, *_others(tried[fits:]), *(f"refused: {one}" for one in refused)]
    return _told(task, asked, chosen, rest) if fits else (None, rest)


def _told(
    task: Task, asked: Asked, chosen: Candidate, rest: Sequence[str]
) -> tuple[str, list[str]]:
    said = [f"chosen: {chosen.strategy.name} ({chosen.strategy.what})", f"  {chosen.numbers}"]
    changes, reasons = chosen.way.changes, _reasons(chosen.way)
    why = [f"  {path}={json.dumps(changes[path])}: {why}" for path, why in reasons.items()]
    what = "low-rank updates" if task.lora else "all weights"
    head = [f"{task.name}: {what} of {task.model.get('path') or 'a model'}.", "", *said, *rest]
    recipe = drafted(task, asked, changes, head=head, reasons=reasons)
    return recipe, [*said, *why, *rest]


def _require_sound(base: Base) -> None:
    """Raises UsageError for mistakes that are no strategy's: a model or data that is not there."""
    try:
        base.checked({})
    except RecipeError as error:
        own = [one for one in error.problems if one.key.split(".")[0] != WRAP]
        if own:
            raise UsageError("; ".join(one.message for one in own), hint=own[0].hint) from error


def _reasons(way: Way) -> Mapping[str, str]:
    """Path -> what a change does, and what would be short without it."""
    found: dict[str, str] = {}
    for saving, changes in way.saved:
        short = way.needed.get(saving.order)
        needed = f"; without it {gib(short.needed)} GiB of {short.what}" if short else ""
        found |= dict.fromkeys(changes, f"{saving.what}{needed}")
    return found


def _others(tried: Sequence[Candidate]) -> Iterator[str]:
    titles = {True: "fits too:", False: "needs too much, with all saved that can be:"}
    for fits, title in titles.items():
        others = [one for one in tried if one.way.fits is fits]
        if others:
            yield title
        for one in others:
            yield f"  {one.what}: {one.numbers}"


def _warnings(drawn: MemoryPlan) -> Iterator[str]:
    network = drawn.time.network
    if network > SLOW * (sum(drawn.time.reached.values()) - network):
        yield (
            f"warning: GPUs wait for the network, which takes {network:.3g} s of a step; a faster "
            "one (--interconnect), more samples a step (--global-batch) or --lora would help"
        )


def _more_nodes(
    task: Task, base: Base, topology: Topology, strategies: Sequence[Strategy]
) -> Iterator[str]:
    """Where it fits without offloading and as it was meant to be computed."""
    if topology.nodes > 1:
        yield "tensor parallelism, which is usual for models of this size, is not there"
    # Enough samples for any number of nodes; memory hardly depends on it.
    batch = {"train.global_batch_size": task.global_batch or MOST_NODES * topology.local_ranks}
    sharded = [wrapped(named, WRAP) for named in strategies if named.order == Tier.SHARDED]
    found = [on_more_nodes(base, topology, {**start, **batch}) for start in sharded]
    fewest = min((asked.nodes or 1 for asked, _ in filter(None, found)), default=None)
    if fewest is not None:
        yield f"without offloading, and with nothing in fewer bits, it fits on {fewest} nodes"


def _low_rank(base: Base, strategies: Sequence[Strategy]) -> Iterator[str]:
    """Say what fits where low-rank updates are trained in place of all weights."""
    on_gpus = [named for named in strategies if named.order < Tier.OFFLOADED]
    tried, _ = choose(base, on_gpus, WRAP)
    if tried and tried[0].way.fits:
        yield f"low-rank updates (--lora) would fit with {tried[0].what}: {tried[0].numbers}"
