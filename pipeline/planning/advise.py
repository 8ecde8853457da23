"""Draft a recipe for a model, data and machines, under the best strategy that fits."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.chain.registry import Plugins, Registry
from pipeline.errors import RecipeError, UsageError
from pipeline.execution.in_process import scratch_context
from pipeline.planning import search
from pipeline.planning.hardware import HardwareOptions, Margins, resolve_topology
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.planner import Strategy, Tier, in_order
from pipeline.planning.report import memory, spare
from pipeline.planning.search import Candidate, SearchBase, overrides
from pipeline.planning.shapes import Topology
from pipeline.recipe.dump import render

if TYPE_CHECKING:
    from pipeline.contracts.stage import Context

NEAR = 2
"""Folders above its own in which a recipe names files relative to itself."""
WRAP = "wrap"
"""The slot that a template leaves empty for the strategy."""
EXAMPLE = """\
{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
{"messages": [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}]}
"""
"""Data that a recipe names when none is given."""


@dataclass(frozen=True, kw_only=True)
class AdviceRequest:
    """The training to draft a recipe for; None leaves a number to the template. model: fields of
    the model slot. sequence: tokens of a sample. global_batch, micro_batch: samples of an optimizer
    step, and most of a forward pass. compute: dtype that suits the devices, such as `bf16`. survey:
    the template's survey of the data. reasons: more lines that say why. folder: the recipe's, from
    which it names files near it."""

    name: str
    model: Mapping[str, Any]
    data: Path
    lora: bool
    sequence: int | None
    global_batch: int | None
    micro_batch: int | None
    ranks: int
    on_gpus: bool
    compute: str
    survey: Any = None
    reasons: tuple[str, ...] = ()
    folder: Path | None = None

    def named(self, value: Any) -> Any:
        """A value; an absolute path near the recipe's folder becomes relative to it."""
        if self.folder is None or not (isinstance(value, str) and value.startswith("/")):
            return value
        name = os.path.relpath(value, self.folder.absolute())
        near = name if name.startswith("..") else f"./{name}"
        return value if name.split("/").count("..") > NEAR else near


class Template(Protocol):
    """Drafts a recipe for a request."""

    def __call__(self, request: AdviceRequest, /) -> Mapping[str, Mapping[str, Any]]:
        """Return the slots of a recipe for a request, with an empty one called `wrap`."""

    def look(self, ctx: Context, model: Mapping[str, Any], file: Path, /) -> Any:
        """Look at the data for a model slot's fields, for `AdviceRequest.survey`."""

    def prefers_low_rank(self, survey: Any, /) -> tuple[bool, str]:
        """Return whether low-rank updates suit the model, and why."""

    def explained(
        self, request: AdviceRequest, slots: Mapping[str, Mapping[str, Any]], /
    ) -> Iterable[str]:
        """Return a line for each choice that the data has decided."""


class Templates(Plugins[Template]):
    group = "pipe.templates"
    noun = "template"

    @classmethod
    def finetune(cls) -> Template:
        """The template of a fine-tuning. Raises PluginError."""
        return cls.installed().load("finetune")


def advise(
    task: AdviceRequest, machines: HardwareOptions, margins: Margins, registry: Registry
) -> tuple[str | None, list[str]]:
    """The recipe under the best strategy, with as few savings as it needs, or None if nothing fits;
    and lines for people: the choice, its reasons, the alternatives. Raises PipeError."""
    strategies = in_order(registry)
    if not strategies:
        raise UsageError("no installed stage offers a strategy")
    home, task = task.folder, replace(task, folder=None)  # drafts lie in a temporary folder
    topology = resolve_topology(machines, task.ranks, "cuda" if task.on_gpus else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        data.write_text(EXAMPLE, "utf-8")
        trial = task if task.data.exists() else replace(task, data=data)

        def based(name: str, **changes: Any) -> SearchBase:
            file, request = Path(folder) / name, replace(trial, **changes)
            file.write_text(drafted(request, {WRAP: strategies[0].generous}), "utf-8")
            return SearchBase(recipe=file, machines=machines, margins=margins, registry=registry)

        base = based("recipe.yaml")
        try:
            base.checked({})
        except RecipeError as error:  # another strategy may mend only mistakes of its slot
            own = [one for one in error.problems if one.key.split(".")[0] != WRAP]
            if own:
                said = "; ".join(one.message for one in own)
                raise UsageError(said, hint=own[0].hint) from error
        tried, refused = search.choose(base, search.suited(strategies, topology), WRAP)
        if not tried:
            raise UsageError("\n".join(["no strategy can be planned", *refused]))
        chosen, fits = tried[0], tried[0].fits
        rest = [*_other_ways(task, based, chosen, strategies, topology)]
        for able, title in ((True, "fits too:"), (False, "needs too much, with all savings:")):
            found = [f"  {_line(one)}" for one in tried[fits:] if one.fits is able]
            rest += [title, *found] if found else []
        rest += [f"refused: {one}" for one in refused]
        if not fits:
            return None, rest
        reasons = [*Templates.finetune().explained(task, _slots(task, chosen.changes))]
        lines = [*reasons, *task.reasons, *_explained(chosen, tried), *rest]
        return drafted(replace(task, folder=home), chosen.changes, lines), lines


def _other_ways(
    task: AdviceRequest, based: Callable[..., SearchBase], chosen: Candidate,
    strategies: Sequence[Strategy], topology: Topology,
) -> Iterator[str]:  # fmt: skip
    """More nodes, or low-rank updates, where the choice costs more than time. based: makes the
    request with changes, in a file of that name."""
    on_gpus = chosen.fits and chosen.strategy.order < Tier.OFFLOADED
    starts = [{WRAP: one.generous} for one in strategies if one.order == Tier.SHARDED]
    if task.on_gpus and (chosen.narrow or not on_gpus) and starts:
        # Enough samples for any number of nodes; memory hardly depends on it.
        batch = task.global_batch or search.MOST_NODES * topology.local_ranks
        nodes = based("nodes.yaml", global_batch=batch)
        more = search.on_more_nodes(nodes, topology, starts[0])
        if more is not None:
            count = more.memory_plan.topology.nodes
            yield f"without offloading and narrower dtypes, it fits on {count} nodes"
    if not task.lora and not on_gpus:
        near = [one for one in search.suited(strategies, topology) if one.order < Tier.OFFLOADED]
        low, _ = search.choose(based("low_rank.yaml", lora=True), near, WRAP)
        if low and low[0].fits:
            yield f"low-rank updates (--lora) would fit with {_line(low[0])}"


def _explained(chosen: Candidate, tried: Sequence[Candidate]) -> Iterator[str]:
    """The choice, and each of its savings with what the recipe would need without it."""
    yield f"chosen: {chosen.strategy}"
    yield f"  {_numbers(chosen.memory_plan)}"
    yield from (f"  {line}" for line in spare(chosen.memory_plan))
    if chosen.strategy.axes:
        yield f"  {_reason(chosen, tried)}"
    for one in chosen.saved:
        if one.fields.items() <= chosen.saving.items():  # no later one changes the same field
            without = memory(chosen.without(one).memory_plan)
            yield f"  {' '.join(overrides(one.fields))}: {one.what}; without it {without}"


def _reason(chosen: Candidate, tried: Sequence[Candidate]) -> str:
    alone = [one for one in tried if not one.strategy.axes]
    fitting = search.best(alone)
    if not alone:
        return "data parallelism cannot be planned"
    if fitting is None:
        least = min(alone, key=lambda one: one.memory_plan.needed)
        return (
            f"data parallelism does not fit: {least.strategy.name}, with all that only costs "
            f"time, needs {memory(least.memory_plan)}"
        )
    mine, others = chosen.memory_plan.time.expected, fitting.memory_plan.time.expected
    idle = fitting.memory_plan.idle
    why = f", which leaves {idle} GPUs without a sample" if idle else ""
    return (
        f"data parallelism is no better: a step takes {others:.3g} s under "
        f"{fitting.strategy.name}{why}, {mine:.3g} s so"
    )


def _numbers(memory_plan: MemoryPlan) -> str:
    parts, time = [memory(memory_plan)], memory_plan.time
    if time.parts:
        unknown = f"; {' and '.join(time.unknown)} not known" if time.unknown else ""
        parts.append(f"a step of about {time.expected:.3g} s, bound by {time.bound}{unknown}")
    if memory_plan.idle:
        parts.append(f"{memory_plan.idle} of {memory_plan.topology.ranks} GPUs without a sample")
    return ", ".join(parts)


def _line(one: Candidate) -> str:
    saved = " ".join(["", "with", *overrides(one.saving)] if one.saved else [])
    return f"{one.strategy}{saved}: {_numbers(one.memory_plan)}"


def look(model: Mapping[str, Any], file: Path) -> Any:
    """Return the template's survey of a data file, for a model slot's fields. Raises PipeError."""
    with scratch_context(logging.Logger("pipe.look", logging.ERROR)) as ctx:
        return Templates.finetune().look(ctx, model, file)


def _slots(task: AdviceRequest, changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    slots = {slot: dict(fields) for slot, fields in Templates.finetune()(task).items()}
    for path, value in changes.items():
        slot, _, name = path.partition(".")
        slots[slot] = {**slots[slot], name: value} if name else value
    return slots


def drafted(
    task: AdviceRequest, changes: Mapping[str, Any], comments: Sequence[str] = ()
) -> str:  # fmt: skip
    """The recipe as YAML, under comments."""
    launch = {"procs": task.ranks, "device": "cuda" if task.on_gpus else "cpu"}
    recipe = {"name": task.name, "seed": 0, "launch": launch, "stages": _slots(task, changes)}
    return "\n".join([*(f"# {line}".rstrip() for line in comments), "", render(recipe)])
