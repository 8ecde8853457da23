"""Planner of the stages for canonical checkpoints."""

from __future__ import annotations

from pipeline.artifacts import Precision
from pipeline.length import Length
from pipeline.planning.estimate import Extras, HostNeed, Storage
from pipeline.planning.planner import Planner
from pipeline.planning.shapes import BYTES, ModelShape, OptimizerShape
from pipeline.planning.strategy import StrategyMemory
from pipeline.planning.topology import Topology
from pipeline.state.count import count
from pipeline.state.staging import PASSAGE
from pipeline.throughput import human
from stages.checkpoint.settings import CheckpointSettings

NARROWEST = 16
"""Bits of a moment that is saved as it is kept; of fewer, its values are saved in fp32."""


class CheckpointPlanner(Planner[CheckpointSettings]):
    """Planner of `checkpoint.sharded` and `checkpoint.full`."""

    def forecast(
        self,
        topology: Topology,
        model: ModelShape,
        precision: Precision,
        optimizer: OptimizerShape,
        strategy: StrategyMemory,
    ) -> Extras:
        """Host memory for what is copied to be written, each rank of its share; disk for as many
        checkpoints as there will be at once."""
        averages = strategy.averaged * model.trained
        trained = trained_bytes(model, precision, optimizer) + averages
        size = state_bytes(model, precision, optimizer) + averages
        all_passes = topology.device == "cpu" or not self.stage.asynchronous
        on_host = strategy.masters[1] != "device"
        passing = size if all_passes else trained if on_host else 0
        share, passing = (-(-part // topology.ranks) for part in (size - passing, passing))

        def saved(length: Length) -> Storage:
            found = count(self.stage.retention, self.stage.every, length)
            formula = f"{found.number} x {human(size)}"
            return Storage(what=str(found), bytes=found.number * size, formula=formula)

        need = HostNeed(
            phase="",
            what="copy for checkpoints",
            bytes=(share + min(passing, PASSAGE)) * topology.on_node,
            formula=f"({human(share)} + at most {human(PASSAGE)} of {human(passing)} that passes) "
            f"x {topology.on_node} ranks of a node",
        )
        return Extras(host=[need], saved=saved)


def state_bytes(model: ModelShape, precision: Precision, optimizer: OptimizerShape) -> int:
    """Bytes of a checkpoint without averages: weights that are not borrowed, and moments of those
    that are trained."""
    frozen = (model.stored - model.trained) * BYTES[precision.master]
    return frozen + trained_bytes(model, precision, optimizer)


def trained_bytes(model: ModelShape, precision: Precision, optimizer: OptimizerShape) -> int:
    """Bytes of these that are masters and moments of what is trained."""
    bits = optimizer.bits / optimizer.moments
    moment = (bits if bits >= NARROWEST else 32) / 8
    return round(model.trained * (BYTES[precision.master] + optimizer.moments * moment))
