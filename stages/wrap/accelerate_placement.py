"""What accelerate's replicas hold, and when: torch's DistributedDataParallel as it makes it, or the
model alone on one process."""

from __future__ import annotations

from dataclasses import replace

from pipeline.artifacts import Precision
from pipeline.forecast.placement import BUFFERS, GRADIENTS, PARAMETERS
from pipeline.forecast.shapes import ModelShape, OptimizerShape
from pipeline.forecast.site import Site
from pipeline.forecast.sizes import Sizes
from stages.wrap.ddp_placement import DdpPlacement

BUCKET = 25 << 20
"""Bytes of gradients that torch reduces at a time."""
MESSAGE = 250 << 20
"""Bytes of weights that torch sends at a time while it makes replicas the same, of which two are
under way (torch/nn/parallel/distributed.py, broadcast_bucket_size)."""


def replicated(
    site: Site, model: ModelShape, precision: Precision, optimizer: OptimizerShape
) -> AcceleratePlacement:
    """For a model on every rank of the site, whose gradients are reduced as they are."""
    sizes = Sizes.of(precision)
    return AcceleratePlacement(
        site.ledger,
        model,
        optimizer,
        replace(sizes, reduce=sizes.master),
        ranks=site.ranks,
        views=False,
        bucket=BUCKET,
    )


class AcceleratePlacement(DdpPlacement):
    """A replica of everything. Gradients are tensors of their own, which an update drops; with
    several processes the buckets that are reduced stay beside them."""

    def load(self) -> None:
        held = sum(w.bytes(self._size(w)) for w in self._weights)
        self.ledger.change(PARAMETERS, held)
        if self.ranks > 1:
            largest = max((w.bytes(self._size(w)) for w in self._weights), default=0)
            self.ledger.pulse(BUFFERS, min(held, 2 * max(MESSAGE, largest)))
            self.ledger.change(GRADIENTS, self._trained * self._sizes.master)
        self._explain()

    def _explain(self) -> None:
        sizes, trained, tell = self._sizes, self._trained / 1e9, self.ledger.explain
        again = ", and once more in buckets" if self.ranks > 1 else ""
        tell(GRADIENTS, f"{sizes.master} bytes x {trained:.4g} G trained{again}")
        tell(BUFFERS, "weights that are sent to make replicas the same")
        super()._explain()
