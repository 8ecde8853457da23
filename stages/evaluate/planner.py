"""Planner of `evaluate.lm`."""

from __future__ import annotations

from pipeline.planning.estimate import Exported, Extras, HostNeed
from pipeline.planning.planner import Planner
from pipeline.planning.shapes import ModelShape
from pipeline.planning.timeline import EVALUATION
from pipeline.planning.topology import Topology
from stages.evaluate.lm import WINDOW, EvaluateLm

LOGIT = 3 * 4
"""Bytes: it is there in fp32 up to three times."""


class EvaluatePlanner(Planner[EvaluateLm]):
    """Planner of `evaluate.lm`."""

    def forecast(self, topology: Topology, exported: Exported, model: ModelShape) -> Extras:
        """Host memory of rank 0's node for the exported model and logits; on GPUs nothing is told
        of those over which transformers spreads it."""
        if topology.device != "cpu":
            left = "the exported model on GPUs and their host while it is evaluated"
            return Extras(caveats=[left])
        tokens = self.stage.batch_size * (self.stage.window or WINDOW)
        loaded = HostNeed(
            phase=EVALUATION,
            what="exported model",
            bytes=exported.loaded,
            formula="as others load it, on rank 0",
        )
        logits = HostNeed(
            phase=EVALUATION,
            what="logits of an evaluation",
            bytes=tokens * model.vocabulary * LOGIT,
            formula=f"{tokens} tokens x {model.vocabulary} x {LOGIT} bytes",
        )
        return Extras(host=[loaded, logits])
