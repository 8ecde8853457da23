"""Dynamic loss scaling (Micikevicius et al. 2018, Mixed Precision Training, section 3.2)."""

from __future__ import annotations

from pipeline import LossScale, LossScaling

GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """The factor by which losses are multiplied, so that gradients stay in the range of fp16.

    It is halved when a gradient overflows, and doubled after `growth_interval` steps without.
    """

    def __init__(self, scaling: LossScaling) -> None:
        self.scale = scaling.initial_scale
        self._interval = scaling.growth_interval
        self._good_steps = 0

    def update(self, *, overflowed: bool) -> None:
        """Adjust the scale after a step."""
        if overflowed:
            self.scale *= BACKOFF
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._interval:
            self.scale *= GROWTH
            self._good_steps = 0

    @property
    def state(self) -> LossScale:
        """State for a checkpoint."""
        return LossScale(scale=self.scale, good_steps=self._good_steps)

    def restore(self, saved: LossScale) -> None:
        """Go on from a checkpoint. The interval stays the recipe's."""
        self.scale = saved.scale
        self._good_steps = saved.good_steps % self._interval
