"""Planner of `precision.policy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.artifacts import Precision
from pipeline.planning.planner import Planner
from pipeline.planning.topology import Topology
from stages.precision.policy import PrecisionPolicy


class PolicyPlanner(Planner[PrecisionPolicy]):
    """Planner of `precision.policy`, which declares what is planned with."""

    def depends(self) -> Mapping[str, Any]:
        return {"compute": self.stage.compute, "buffer": self.stage.buffer}

    def forecast(self, topology: Topology) -> Precision:
        return self.stage.declared()
