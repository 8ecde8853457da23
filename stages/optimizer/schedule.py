"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def lr_scale(
    step: int, total: int, *, schedule: Schedule, warmup: int, final_scale: float
) -> float:
    """Factor on the base learning rate for zero-based `step` of `total`.

    Rises linearly over `warmup` steps, (step + 1) / warmup, reaching 1; then stays, or falls
    linearly or by half a cosine (Loshchilov & Hutter 2017, SGDR, eq. 5) to `final_scale` at the
    last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    position = (step - warmup + 1) / max(total - warmup, 1)
    position = min(position, 1.0)
    left = 1.0 - position if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * position))
    return final_scale + (1.0 - final_scale) * left
