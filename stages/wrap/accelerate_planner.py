"""Planner of `wrap.accelerate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.artifacts import Precision
from pipeline.importing.files import read_config
from pipeline.planning.estimate import Extras, HostNeed
from pipeline.planning.planner import Planner, Planners, Topology
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import OptimizerShape, Sizes
from pipeline.planning.strategy import LOAD, StrategyMemory
from stages.wrap.accelerate import Accelerate
from stages.wrap.accelerate_checks import KEY, is_handed_on, is_sharded
from stages.wrap.accelerate_handed import HandedOn
from stages.wrap.ddp_planner import Replicated


def plainly_replicated(
    topology: Topology, profile: Profile, precision: Precision, optimizer: OptimizerShape
) -> StrategyMemory:
    """A replica on every rank as accelerate makes it: gradients are tensors of their own, reduced
    as they are, and with several processes the buckets stay beside them."""
    ranks, sizes = topology.ranks, Sizes.by(replace(precision, reduce=precision.master))
    return Replicated(ranks, profile, optimizer, sizes, views=False, buckets=ranks > 1)


class AcceleratePlanner(Planner[Accelerate]):
    """Planner of `wrap.accelerate`: what is sharded is as under the wrap stage which `pipe import`
    makes of such a file; FSDP has whole models in host memory before."""

    def forecast(
        self, topology: Topology, profile: Profile, precision: Precision, optimizer: OptimizerShape
    ) -> tuple[StrategyMemory, Extras]:
        path = Path(self.stage.config).expanduser()
        content = read_config(path).content
        if not is_sharded(content) and not is_handed_on(content):
            return plainly_replicated(topology, profile, precision, optimizer), Extras()
        handed = HandedOn(path, KEY)
        kind = Planners.installed().find(handed.use)
        assert kind is not None
        strategy: StrategyMemory = kind(handed.stage).forecast(
            topology, profile, precision, optimizer
        )
        whole = HostNeed(
            phase=LOAD,
            what="models before they are sharded",
            bytes=profile.model.held(Sizes.by(precision)) * topology.on_node,
            formula=f"all weights for each of {topology.on_node} ranks",
        )
        return strategy, Extras(host=[whole] if is_sharded(content) else [])
