"""A model that is not trained, under every strategy: scores of rows, in the order of the data,
without masters and optimizer state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipeline.contracts.data import Data
from pipeline.distributed.process_group import DistContext
from stages.objectives.cross_entropy import RowLoss
from stages.optimizer import NoOptimizer
from stages.precision.policy import PrecisionPolicy
from stages.train.evaluation import rows_in_order
from tests.parity.body import tiny_source, wrap_fields
from tests.support.models import filled
from tests.support.processes import run_ranks
from tests.support.runs import ToySamples, context
from tests.support.strategies import STRATEGIES

SAMPLES = ToySamples(41, 101, 3)
DATA = Data(train=SAMPLES, heldout=None, pad_id=0, identity={})
LAYOUTS = {
    1: ["ddp"],
    2: ["ddp context", "fsdp full", "fsdp tensor", "fsdp pipeline", "zero1", "zero3",
        "zero2 tensor", "accelerate ddp"],
    3: ["ddp"],
}  # fmt: skip
Told = tuple[list[float], list[dict[str, Any]]]


def scores(dist: DistContext, folder: str, names: list[str]) -> list[Told]:
    """Score every sample in fp32 under each strategy; return the scores, and the engine's facts
    then and in bf16."""
    ctx, told = context(dist, folder), []
    for name in names:
        found, facts, known = list[float](), [], STRATEGIES[name]
        stage = replace(known, fields=wrap_fields(dict(known.fields), folder, dist)).stage()
        for compute in ("fp32", "bf16"):
            precision = PrecisionPolicy(compute=compute, reduce="fp32").run(ctx)  # type: ignore[arg-type]
            engine = stage.run(ctx, tiny_source(ctx), precision, NoOptimizer().run(ctx))
            one = rows_in_order(engine, RowLoss(), DATA, SAMPLES, 1, dist)
            for rows in one if not found else ():
                assert rows is not None
                found += rows[:, 0].tolist()
            facts.append(dict(engine.describe()))
            assert engine.state().groups == []
            engine.close()
        told.append((found, facts))
    return told


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_scores_of_rows_are_a_plain_models(ranks: int, tmp_path: Path) -> None:
    model = filled(tiny_source(context(DistContext(device=torch.device("cpu")), tmp_path))).eval()
    expected = []
    for number in range(len(SAMPLES)):
        sample = SAMPLES[number]
        ids, labels = map(torch.from_numpy, (sample.input_ids, sample.labels))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        expected.append(float(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")))
    told = run_ranks(scores, ranks, str(tmp_path), LAYOUTS[ranks])[0]
    for name, (found, (facts, narrow)) in zip(LAYOUTS[ranks], told, strict=True):
        assert found == pytest.approx(expected, rel=2e-6, abs=1e-5), name
        assert facts["trained_parameters"] == 0, name
        # Weights are held in the compute dtype.
        assert (narrow["compute"], narrow.get("master", [])) == (["bf16"], []), name
