"""Tensors that ranks share stay alike to the bit, even where each rounds its copy at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.contracts.precision import Precision
from pipeline.distributed.process_group import DistContext
from stages.optimizer.adamw import AdamW
from stages.wrap.axes import PipelineParallel, TensorParallel
from stages.wrap.fsdp import Fsdp
from tests.parity.body import tiny_source
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import digest, hashed, train
from tests.support.tensor import FAMILIES

ROUNDED = AdamW(lr=1e-3, kernel="single", stochastic_rounding=True)
BF16 = Precision(master="bf16", compute="bf16", reduce="fp32", buffer=None, loss_scaling=None)


def tied_copies(dist: DistContext, folder: str) -> list[str]:
    """Return digests of the embedding on the first stage of a pipeline and on the last."""
    ctx = context(dist, folder)
    wrap = Fsdp(pipeline_parallel=PipelineParallel(size=2))
    engine: Any = wrap.run(ctx, tiny_source(ctx), BF16, ROUNDED.run(ctx))
    train(engine, 0, 3)
    (stage,) = engine.parts
    copies = dist.gather(hashed(stage.get_input_embeddings().weight.detach().to_local()))
    engine.close()
    return list(copies)


def whole_parameters(dist: DistContext, folder: str) -> int:
    """Train layers that ranks divide; return the number of tensors of the state. `digest` raises if
    ranks have other values of the same elements."""
    ctx = context(dist, folder)
    wrap = Fsdp(tensor_parallel=TensorParallel(size=2))
    source = tiny_source(ctx, **FAMILIES["llama with biases"])
    engine = wrap.run(ctx, source, BF16, ROUNDED.run(ctx))
    train(engine, 0, 3)
    found = digest(engine, dist)
    engine.close()
    return len(found)


def test_copies_of_a_tied_embedding_stay_the_same(tmp_path: Path) -> None:
    first, last = run_ranks(tied_copies, 2, str(tmp_path))[0]
    assert first == last


def test_parameters_that_are_not_divided_stay_the_same(tmp_path: Path) -> None:
    assert run_ranks(whole_parameters, 2, str(tmp_path))[0] > 50
