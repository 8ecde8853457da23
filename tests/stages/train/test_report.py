"""What is reported of a training, and what its progress keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pipeline.artifacts import Progress, TrainedRun
from pipeline.dist import Dist
from pipeline.engine import StepReport
from pipeline.metrics import records
from stages.train.report import Reporter
from tests.support.runs import context

ENGINE: Any = SimpleNamespace(shard=SimpleNamespace(count=1))


def test_a_number_that_is_none_ends_nothing(tmp_path: Path) -> None:
    """JSON has no word for it, and the run's record is JSON."""
    progress = Progress()
    reporter = Reporter(context(Dist(device=torch.device("cpu")), tmp_path), ENGINE, 1, 2, progress)
    seen = []
    for loss, heldout in ((2.0, 3.0), (math.nan, math.inf)):
        progress.step += 1
        reporter.add(torch.tensor(loss), StepReport(grad_norm=1.0, applied=True, loss_scale=1.0))
        reporter.evaluated(heldout)
        seen.append(dict(progress.metrics))
    assert seen == [{"loss": 2.0, "eval_loss": 3.0}, {}]
    told = [
        (line.get("loss"), line.get("eval_loss")) for line in records(tmp_path / "metrics.jsonl")
    ]
    assert told == [(2.0, None), (None, 3.0), (None, None), (None, None)]
    json.dumps(TrainedRun(checkpoint="x", progress=progress).record(), allow_nan=False)
