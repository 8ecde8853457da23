"""What a build refuses or warns of before DeepSpeed begins."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from torch import nn

from pipeline import ModelSource, StageError
from pipeline.contracts.optimizer import Precision
from pipeline.testing import context
from stages.optimizer.lion import Lion
from stages.wrap.zero import OptimizerOffload, Zero
from stages.wrap.zero.build import beyond_bucket


def test_a_rule_that_no_field_tells_is_refused_at_the_start(tmp_path: Path) -> None:
    """An optimizer stage of another package may have no `update_rules` for `pipe check`."""
    stage = Zero(stage=3, offload_optimizer=OptimizerOffload(device="nvme", path="/scratch"))
    ctx, whole = context(tmp_path), {"master": "fp32", "compute": "fp32", "reduce": "fp32"}
    precision = Precision(**whole, buffer=None, loss_scaling=None)
    with pytest.raises(StageError, match=r"nvme needs DeepSpeed's CPU Adam, .* asks for lion"):
        stage.run(ctx, cast("ModelSource", None), precision, Lion().run(ctx))


def test_gradients_that_overlapped_reductions_may_lose() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 4))
    overlapped = Zero(overlap_comm=True, reduce_bucket_size=199)
    assert beyond_bucket(overlapped, model) == ("0.weight", 200)
    assert beyond_bucket(Zero(reduce_bucket_size=199), model) is None
    assert beyond_bucket(Zero(overlap_comm=True, reduce_bucket_size=200), model) is None
    model[0].weight.requires_grad = False
    assert beyond_bucket(overlapped, model) is None
