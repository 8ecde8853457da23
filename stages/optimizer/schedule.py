"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd"]


def lr_scale(
    step: int,
    total: int,
    *,
    schedule: Schedule,
    warmup: int,
    final_scale: float,
    decay: int = 0,
    power: float = 1.0,
) -> float:
    """Factor on the base learning rate for zero-based `step` of `total`.

    Rises linearly over `warmup` steps, (step + 1) / warmup, reaching 1. Then:

    - constant: stays at 1.
    - inverse_sqrt: sqrt(warmup / (step + 1)) (Vaswani et al. 2017, section 5.3).
    - the others go to `final_scale` at the last step: linear; cosine by half a cosine (Loshchilov &
      Hutter 2017, SGDR, eq. 5); polynomial with what is left of the steps to the `power`; wsd stays
      at 1 and falls linearly in the last `decay` steps (Hu et al. 2024, MiniCPM, section 4).
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1))
    begin = max(warmup, total - decay) if schedule == "wsd" else warmup
    position = (step - begin + 1) / max(total - begin, 1)
    left = 1.0 - min(max(position, 0.0), 1.0)
    if schedule == "cosine":
        left = 0.5 * (1.0 - math.cos(math.pi * left))
    elif schedule == "polynomial":
        left = left**power
    return final_scale + (1.0 - final_scale) * left


def steps_in(ratio: float, total: int) -> int:
    """A fraction of all steps, rounded up."""
    return math.ceil(round(ratio * total, 9))  # 0.07 x 100 is a little more than 7 in binary
