"""What formats of other tools say of an optimizer, in canonical terms."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from pipeline.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS = ("lr", "betas", "eps", "weight_decay")
"""Hyperparameters that say what the optimizer computes; the rest says how."""


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a saved group. The learning rate is the base rate where the group keeps it; without a
    schedule of torch's, only the rate of the last step is there."""
    found = {key: plain(group[key]) for key in SETTINGS if key in group}
    if group.get("initial_lr") is not None:
        found["lr"] = plain(group["initial_lr"])
    return found


def plain(value: Any) -> Any:
    """A saved value as JSON has it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def require_moments(kinds: Collection[str], where: str, name: str) -> None:
    """Raises CheckpointError unless a parameter has what Adam keeps for every element of it."""
    if not kinds:
        raise CheckpointError(
            f"{where}: holds no optimizer state of {name}",
            hint="it was saved before the first update, or by DeepSpeed with an offload ratio "
            "below 1; --weights-only takes the weights alone",
        )
    if set(kinds) != set(MOMENTS):
        raise CheckpointError(
            f"{where}: the optimizer kept {', '.join(sorted(kinds))} for {name}; only Adam's "
            f"{' and '.join(MOMENTS)} can be converted",
            hint="--weights-only takes the weights alone",
        )


def fresh_progress(step: int, samples: int, skipped: int = 0) -> dict[str, Any]:
    """Progress of a training that is not ours: whose model and data it was is unknown."""
    return {
        "step": step, "samples": samples, "tokens": 0, "skipped": skipped,
        "metrics": {}, "origin": {},
    }  # fmt: skip
