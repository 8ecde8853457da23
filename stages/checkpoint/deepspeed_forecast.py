"""What DeepSpeed's own checkpoints take.

Every rank writes and reads a file with its part of masters and moments. The compute weights are in
rank 0's file as a whole at stages 1 and 2, and every rank reads it; at stage 3 each rank writes its
parts of frozen ones, and none of the others (runtime/engine.py, save_checkpoint).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.forecast.phases import RESUME, SAVE
from pipeline.forecast.result import Device, Extras, Host, Storage
from pipeline.forecast.shapes import ModelShape, OptimizerShape
from pipeline.forecast.site import Site
from pipeline.length import Length
from pipeline.state.count import count
from pipeline.throughput import human
from stages.wrap.zero.memory.sharded import Sharded
from stages.wrap.zero.placement import ZeroPlacement

if TYPE_CHECKING:
    from stages.checkpoint.deepspeed import DeepSpeedCheckpoint


def extras(
    stage: DeepSpeedCheckpoint,
    site: Site,
    model: ModelShape,
    optimizer: OptimizerShape,
    placement: ZeroPlacement,
) -> Extras:
    """Disk for as many as there will be at once; memory for what is copied to the host to be
    written, and for files that are read."""
    files = _Files(site, model, optimizer, placement)

    def saved(length: Length) -> Storage:
        found = count(stage.retention, stage.every, length)
        return Storage(
            what=str(found),
            bytes=found.number * files.size,
            formula=f"{found.number} x ({files.formula})",
        )

    return Extras(host=list(files.host()), device=list(files.device()), saved=saved)


class _Files:
    """Those of one checkpoint."""

    def __init__(
        self, site: Site, model: ModelShape, optimizer: OptimizerShape, placement: ZeroPlacement
    ) -> None:
        self._site = site
        self._setting = setting = placement.setting
        self._moments = optimizer.moments
        self._whole = setting.stage.stage < 3
        self._placed = placement.weights
        trained, frozen = sum(self._placed.trained), sum(self._placed.frozen)
        if _leaves_out_frozen(model):
            frozen = 0
        self._part = setting.share(trained)
        self._state = (setting.master_bytes + setting.moment_bytes) * trained
        self._weights = setting.compute_bytes * (frozen + (trained if self._whole else 0))

    @property
    def size(self) -> int:
        """Bytes of all files, without what they have beside tensors."""
        return self._state + self._weights

    @property
    def formula(self) -> str:
        """How they come about."""
        state = f"{human(self._state)} of masters and moments"
        return f"{state} + {human(self._weights)} of weights" if self._weights else state

    def host(self) -> Iterator[Host]:
        """Of the fullest node."""
        local = min(self._site.local_ranks, self._site.ranks)
        if self._site.device != "cpu":
            flat = self._flat if self._setting.state_at == "device" else 0
            yield Host(
                phase=SAVE,
                what="copy of what is saved",
                bytes=max(flat * local, self._weights if self._whole else 0),
                formula="a tensor at a time: all weights of rank 0, or a flat one of each rank",
            )
        state = 0 if self._setting.state_at == "disk" else self._own(self._setting.master_bytes)
        weights = self._weights if self._whole else self._setting.share(self._weights)
        yield Host(
            phase=RESUME,
            what="file that is read",
            bytes=max(state, weights) * local,
            formula=f"the larger of two for each of {local} ranks",
        )

    def device(self) -> Iterator[Device]:
        """torch's optimizers have all moments that they are given before they let go of theirs."""
        if self._site.device != "cpu" and self._setting.state_at == "device":
            yield Device(
                phase=RESUME,
                what="moments that are read",
                bytes=self._own(),
                formula="beside those that there are",
            )

    def _own(self, more: int = 0) -> int:
        """A rank's part of moments, and of `more` bytes an element beside them."""
        return self._part * (self._setting.moment_bytes + more)

    @property
    def _flat(self) -> int:
        """Bytes of the largest tensor that is saved of a rank's masters or moments, at most."""
        widest = max(self._setting.master_bytes, self._setting.moment_bytes // self._moments)
        elements = self._part
        if not self._whole:
            elements = Sharded(self._setting, self._placed).sub_group
        return elements * widest


def _leaves_out_frozen(model: ModelShape) -> bool:
    """As the live side decides: DeepSpeed leaves out all that is frozen, or nothing."""
    frozen = [weight for weight in model.weights() if not weight.trained]
    return bool(frozen) and all(weight.borrowed for weight in frozen)
