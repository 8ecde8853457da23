"""How long a training goes on, as far as what it leaves on disk depends on that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Length:
    """Of a whole training."""

    steps: int | None = None
    """Optimizer steps; None: not known."""
    eval_every: int | None = None
    """Steps between evaluations; None: at the end only."""
    eval_first: bool = False
    """Whether there is one before the first step."""
    saves_first: bool = False
    """Whether the state before the first step is saved."""
