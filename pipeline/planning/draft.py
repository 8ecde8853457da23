"""The recipe that advice is given on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.planning.hardware import Asked, narrow_dtype
from pipeline.planning.search import Changes

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
TOKENS = 32768
"""Tokens of a forward pass on one GPU, where nothing is said: enough to keep it busy."""
EXAMPLE = """\
{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
{"messages": [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}]}
"""
"""Data that a recipe names when none is given."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training that is asked for."""

    name: str
    model: Mapping[str, Any]
    """Fields of the model slot."""
    data: Path
    lora: bool
    sequence: int
    global_batch: int | None
    """Samples of a step; None: BATCH, or one for each GPU."""
    micro_batch: int | None
    """Samples of a forward pass, to begin with; None: what makes TOKENS on a GPU, 1 on CPUs."""


def on_cpu(asked: Asked) -> bool:
    """Whether nothing was said of GPUs."""
    return not asked.of_gpus and (asked.machine is None or asked.machine.device == "cpu")


def drafted(
    task: Task,
    asked: Asked,
    changes: Changes,
    *,
    head: Sequence[str] = (),
    reasons: Mapping[str, str] | None = None,
) -> str:
    """YAML; `head`: comments at the top, `reasons`: `slot` or `slot.field` -> comment."""
    slots = {slot: dict(fields) for slot, fields in SLOTS.items()}
    cpu, ranks = on_cpu(asked), asked.procs or 1
    batch = task.global_batch or max(BATCH, ranks)
    most = task.micro_batch or (1 if cpu else max(TOKENS // task.sequence, 1))
    slots["model"] |= task.model
    # Most CPUs only emulate narrow floats.
    slots["precision"]["compute"] = "fp32" if cpu else narrow_dtype(asked)
    slots["data"] |= {"files": str(task.data.absolute()), "sequence_length": task.sequence}
    slots["train"] |= {
        "global_batch_size": batch,
        "micro_batch_size": min(most, -(-batch // ranks)),
    }
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
