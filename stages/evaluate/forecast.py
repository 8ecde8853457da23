"""What an evaluation takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.forecast.phases import EVALUATION
from pipeline.forecast.result import Exported, Extras, Host
from pipeline.forecast.shapes import ModelShape
from pipeline.forecast.site import Site
from stages.evaluate.lm import WINDOW

if TYPE_CHECKING:
    from stages.evaluate.lm import EvaluateLm

LOGIT = 3 * 4
"""Bytes: it is there in fp32 up to three times."""


def extras(config: EvaluateLm, site: Site, exported: Exported, model: ModelShape) -> Extras:
    """Host memory of rank 0's node for the exported model and logits; on GPUs nothing is told of
    those over which transformers spreads it."""
    if site.device != "cpu":
        return Extras(caveats=["the exported model on GPUs and their host while it is evaluated"])
    tokens = config.batch_size * (config.window or WINDOW)
    return Extras(
        host=[
            Host(
                phase=EVALUATION,
                what="exported model",
                bytes=exported.loaded,
                formula="as others load it, on rank 0",
            ),
            Host(
                phase=EVALUATION,
                what="logits of an evaluation",
                bytes=tokens * model.vocabulary * LOGIT,
                formula=f"{tokens} tokens x {model.vocabulary} x {LOGIT} bytes",
            ),
        ]
    )
