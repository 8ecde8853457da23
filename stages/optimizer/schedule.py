"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd"]
Shape = Literal["linear", "cosine", "sqrt"]


def lr_scale(
    step: int,
    total: int,
    *,
    schedule: Schedule,
    warmup: int,
    final_scale: float,
    decay: int = 0,
    shape: Shape = "linear",
    power: float = 1.0,
) -> float:
    """Factor on the base learning rate for zero-based `step` of `total`, as in transformers.

    Rises linearly from 0 over `warmup` steps, step / warmup. Then:

    - constant: stays at 1.
    - inverse_sqrt: sqrt(warmup / step) (Vaswani et al. 2017, section 5.3).
    - the others go to `final_scale`, which the step behind the last would have: linear; cosine by
      half a cosine (Loshchilov & Hutter 2017, SGDR, eq. 5); polynomial with what is left of the
      steps to the `power`; wsd stays at 1 and falls in the last `decay` steps (Hu et al. 2024,
      MiniCPM, section 4), in the `shape` of a line, a cosine, or 1 less a square root (Hägele et
      al. 2024).
    """
    if step < warmup:
        return step / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "inverse_sqrt":
        return math.sqrt(warmup / step) if warmup else 1.0 / math.sqrt(step + 1)
    begin = max(warmup, total - decay) if schedule == "wsd" else warmup
    position = (step - begin) / max(total - begin, 1)
    left = 1.0 - min(max(position, 0.0), 1.0)
    if "cosine" in (schedule, shape):
        left = 0.5 * (1.0 - math.cos(math.pi * left))
    elif shape == "sqrt":
        left = 1.0 - math.sqrt(1.0 - left)
    elif schedule == "polynomial":
        left = left**power
    return final_scale + (1.0 - final_scale) * left


def steps_in(ratio: float, total: int) -> int:
    """A fraction of all steps, rounded up."""
    return math.ceil(round(ratio * total, 9))  # 0.07 x 100 is a little more than 7 in binary
