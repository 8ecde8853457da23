"""From a model and machines to a recipe that fits them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import RecipeError, UsageError
from pipeline.plan.registry import Registry
from pipeline.planning.choice import MOST_NODES, choose, on_more_nodes, suited
from pipeline.planning.hardware import HardwareOptions, Margins, narrow_dtype, resolve_topology
from pipeline.planning.memory_plan import MemoryPlan
from pipeline.planning.planner import Tier
from pipeline.planning.presets import Strategy, in_order
from pipeline.planning.report import memory
from pipeline.planning.search import Candidate, Changes, SearchBase, overrides

WRAP = "wrap"
"""The slot of the strategy."""
SLOTS: Mapping[str, Mapping[str, Any]] = {
    "model": {"use": "model.hf"},
    "adapter": {"use": "adapter.lora", "rank": 16, "alpha": 32},
    "precision": {"use": "precision.policy"},
    "data": {"use": "data.chat", "heldout_fraction": 0.02},
    "optimizer": {"use": "optimizer.adamw", "warmup_ratio": 0.03},
    WRAP: {},
    "checkpoint": {"use": "checkpoint.sharded", "every": 200, "keep": 2},
    "train": {"use": "train.causal_lm", "epochs": 1},
    "consolidate": {"use": "consolidate.stream"},
    "export": {"use": "export.safetensors", "dtype": "bf16"},
}
BATCH = 64
"""Samples of a step, where nothing is said."""
TOKENS = 8192
"""Tokens of a forward pass on one GPU, where nothing is said: enough to keep it busy."""
EXAMPLE = """\
{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
{"messages": [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}]}
"""
"""Data that a recipe names when none is given."""
SLOW = 2
"""How many times as long as all else of a step the network may take before it is warned of."""


@dataclass(frozen=True, kw_only=True)
class AdviceRequest:
    """A training that is machines for: fields of the model slot, tokens of a sample, samples of a step
    (None: BATCH, or one for each GPU), and of a forward pass to begin with (None: what makes TOKENS
    on a GPU, 1 on CPUs)."""

    name: str
    model: Mapping[str, Any]
    data: Path
    lora: bool
    sequence: int
    global_batch: int | None
    micro_batch: int | None


def advise(
    task: AdviceRequest, machines: HardwareOptions, margins: Margins, registry: Registry
) -> tuple[str | None, list[str]]:
    """The recipe under the best strategy, with as little saved as it needs, or None where nothing
    fits; and lines for people: the choice, its reasons, what else there is. Raises PipeError for
    what cannot be planned at all."""
    strategies = in_order(registry)
    if not strategies:
        raise UsageError("no installed stage offers a strategy")
    topology = resolve_topology(
        machines, machines.procs or 1, "cuda" if machines.on_gpus else "cpu"
    )
    known = suited(strategies, topology)
    with tempfile.TemporaryDirectory() as folder:
        file, data = Path(folder) / "recipe.yaml", Path(folder) / "data.jsonl"
        data.write_text(EXAMPLE, "utf-8")
        trial = task if task.data.exists() else replace(task, data=data)
        wrap = {WRAP: strategies[0].generous}
        file.write_text(drafted(trial, machines, wrap), "utf-8")
        base = SearchBase(recipe=file, machines=machines, margins=margins, registry=registry)
        _require_sound(base)
        tried, refused = choose(base, known, WRAP)
        if not tried:
            raise UsageError("\n".join(["no strategy can be planned", *refused]))
        chosen, fits = tried[0], tried[0].fits
        on_gpus = fits and chosen.strategy.order < Tier.OFFLOADED
        rest = [*_warnings(chosen.memory_plan)] if fits else []
        if topology.device != "cpu" and not (on_gpus and not chosen.narrow):
            rest += _more_nodes(task, base, strategies)
        if not task.lora and not on_gpus:
            low_rank = Path(folder) / "low_rank.yaml"
            low_rank.write_text(drafted(replace(trial, lora=True), machines, wrap), "utf-8")
            rest += _low_rank(replace(base, recipe=low_rank), known)
        rest += [*_others(tried[fits:]), *(f"refused: {one}" for one in refused)]
        reasons = _reasons(chosen) if fits else {}
    return _told(task, machines, chosen, reasons, rest) if fits else (None, rest)


def _require_sound(base: SearchBase) -> None:
    """Raises UsageError for mistakes that are no strategy's: a model or data that is not there."""
    try:
        base.checked({})
    except RecipeError as error:
        own = [one for one in error.problems if one.key.split(".")[0] != WRAP]
        if own:
            raise UsageError("; ".join(one.message for one in own), hint=own[0].hint) from error


def _told(
    task: AdviceRequest,
    machines: HardwareOptions,
    chosen: Candidate,
    reasons: Mapping[str, str],
    rest: Sequence[str],
) -> tuple[str, list[str]]:
    """The recipe, which begins with what is said of it, and the same for people."""
    saving, said = (
        chosen.saving,
        [f"chosen: {chosen.strategy}", f"  {_numbers(chosen.memory_plan)}"],
    )
    why = [f"  {path}={json.dumps(saving[path])}: {why}" for path, why in reasons.items()]
    recipe = drafted(task, machines, chosen.changes, head=[*said, *rest], reasons=reasons)
    return recipe, [*said, *why, *rest]


def _reasons(candidate: Candidate) -> Mapping[str, str]:
    """Path -> what a change does, and what the recipe would need without it."""
    found: dict[str, str] = {}
    for one in candidate.saved:
        needed = memory(candidate.without(one).memory_plan)
        found |= dict.fromkeys(one.changes, f"{one.what}; without it {needed}")
    return found


def _numbers(memory_plan: MemoryPlan) -> str:
    """Memory and time, for people."""
    parts, time = [memory(memory_plan)], memory_plan.time
    if time.parts:
        unknown = f"; {' and '.join(time.unknown)} not known" if time.unknown else ""
        parts.append(f"a step of about {time.expected:.3g} s, bound by {time.bound}{unknown}")
    if memory_plan.idle:
        parts.append(f"{memory_plan.idle} of {memory_plan.topology.ranks} GPUs without a sample")
    return ", ".join(parts)


def _line(one: Candidate) -> str:
    """The strategy, what is saved besides, and what it needs."""
    words = " ".join(["", "with", *overrides(one.saving)] if one.saved else [])
    return f"{one.strategy}{words}: {_numbers(one.memory_plan)}"


def _others(tried: Sequence[Candidate]) -> Iterator[str]:
    titles = {True: "fits too:", False: "needs too much, with what can be saved:"}
    for fits, title in titles.items():
        found = [f"  {_line(one)}" for one in tried if one.fits is fits]
        yield from [title, *found] if found else []


def _warnings(memory_plan: MemoryPlan) -> Iterator[str]:
    network = memory_plan.time.network
    if network > SLOW * (sum(memory_plan.time.reached.values()) - network):
        yield (
            f"warning: GPUs wait for the network, which takes {network:.3g} s of a step; a faster "
            "one (--interconnect), more samples a step (--global-batch) or --lora would help"
        )


def _more_nodes(
    task: AdviceRequest, base: SearchBase, strategies: Sequence[Strategy]
) -> Iterator[str]:
    """Where it fits without offloading and as it was meant to be computed."""
    topology = resolve_topology(base.machines, base.machines.procs or 1, "cuda")
    if topology.nodes > 1:
        yield "tensor parallelism, which is usual for models of this size, is not there"
    # Enough samples for any number of nodes; memory hardly depends on it.
    batch = {"train.global_batch_size": task.global_batch or MOST_NODES * topology.local_ranks}
    starts = [{WRAP: one.generous, **batch} for one in strategies if one.order == Tier.SHARDED]
    candidate = on_more_nodes(base, topology, starts[0]) if starts else None
    if candidate is not None:
        nodes = candidate.memory_plan.topology.nodes
        yield f"without offloading, and with nothing in fewer bits, it fits on {nodes} nodes"


def _low_rank(base: SearchBase, strategies: Sequence[Strategy]) -> Iterator[str]:
    """Say what fits where low-rank updates are trained in place of all weights."""
    tried, _ = choose(base, [one for one in strategies if one.order < Tier.OFFLOADED], WRAP)
    if tried and tried[0].fits:
        yield f"low-rank updates (--lora) would fit with {_line(tried[0])}"


def drafted(
    task: AdviceRequest,
    machines: HardwareOptions,
    changes: Changes,
    *,
    head: Sequence[str] = (),
    reasons: Mapping[str, str] | None = None,
) -> str:
    """YAML; `head`: comments at the top, `reasons`: `slot` or `slot.field` -> comment."""
    slots = {slot: dict(fields) for slot, fields in SLOTS.items()}
    cpu, ranks = not machines.on_gpus, machines.procs or 1
    batch = task.global_batch or max(BATCH, ranks)
    most = task.micro_batch or (1 if cpu else max(TOKENS // task.sequence, 1))
    slots["model"] |= task.model
    # Most CPUs only emulate narrow floats.
    slots["precision"]["compute"] = "fp32" if cpu else narrow_dtype(machines)
    slots["data"] |= {"files": str(task.data.absolute()), "sequence_length": task.sequence}
    micro = min(most, -(-batch // ranks))
    slots["train"] |= {"global_batch_size": batch, "micro_batch_size": micro}
    if task.lora:
        slots["optimizer"] |= {"lr": 1e-4, "weight_decay": 0.0}
    else:
        slots["optimizer"] |= {"lr": 1e-5, "weight_decay": 0.1}
        del slots["adapter"]
    for path, value in changes.items():
        slot, _, name = path.partition(".")
        slots[slot] = {**slots[slot], name: value} if name else value
    launch = {"procs": ranks, "device": "cpu" if cpu else "cuda"}
    top = {"name": task.name, "seed": 0, "launch": launch}
    lines = [f"# {line}".rstrip() for line in head]
    lines += ["", *(f"{key}: {json.dumps(value)}" for key, value in top.items())]
    return "\n".join([*lines, "", "stages:", *_written(slots, reasons or {}), ""])


def _written(slots: Mapping[str, Mapping[str, Any]], reasons: Mapping[str, str]) -> Iterator[str]:
    def comment(path: str) -> str:
        return f"  # {reasons[path]}" if path in reasons else ""

    for slot, fields in slots.items():
        yield f"  {slot}:{comment(slot)}"
        for key, value in fields.items():
            text = value if key == "use" else json.dumps(value)
            yield f"    {key}: {text}{comment(f'{slot}.{key}')}"
