"""PowerSGD's own traits, in tests/plugins/powersgd. The matrices of all strategies test the rest: a
plain loop's numbers at full rank, and exact resumes (tests/support/strategies.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline import DistContext
from stages.optimizer.adamw import AdamW
from tests.parity.body import tiny_source
from tests.plugins.powersgd.powersgd import PowerSgd
from tests.support.batches import accumulated, micro_batch
from tests.support.processes import run_ranks
from tests.support.runs import context


def gradient_ranks(dist: DistContext, folder: str, rank: int) -> list[int]:
    """Return the ranks of the gradients of square matrices after one backward."""
    from stages.precision.policy import PrecisionPolicy

    ctx = context(dist, folder)
    precision = PrecisionPolicy(compute="fp32").run(ctx)
    engine: Any = PowerSgd(rank=rank).run(ctx, tiny_source(ctx), precision, AdamW().run(ctx))
    tokens = torch.arange(12).view(2, 6) + dist.rank
    accumulated(engine, [micro_batch(tokens, tokens)], 1)
    return [
        int(torch.linalg.matrix_rank(weight.grad, rtol=1e-4))
        for name, weight in engine.parts[0].named_parameters()
        if "q_proj" in name
    ]


def test_gradients_have_the_rank_that_was_asked_for(tmp_path: Path) -> None:
    for rank in (1, 2):
        for found in run_ranks(gradient_ranks, 2, str(tmp_path), rank):
            assert len(found) == 3
            assert set(found) == {rank}
