"""Blocks of a kind share one compiled graph, whatever a strategy puts around and into them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from pipeline.contracts.data import MicroBatch
from pipeline.contracts.objective import LossParts, ScoreRequest, Scores
from pipeline.distributed.process_group import DistContext
from stages.model.hf import ActivationCheckpointing, Compile, Fp8
from stages.objectives.cross_entropy import CrossEntropy
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from tests.parity.body import tiny_source
from tests.support.batches import accumulated, evaluated, micro_batch
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.strategies import having
from tests.support.tier import FULL

SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
DEEP = {**SIZES, "num_hidden_layers": 9}
"""More blocks than the 8 graphs of a function after which torch gives up by default."""
STRATEGIES = having("basic")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activation_checkpointing": ActivationCheckpointing()},
    "keeping attention": {"activation_checkpointing": ActivationCheckpointing(keep="attention")},
    "8 bits": {"fp8": Fp8(emulate=True)},
    "LoRA": {},
}
LORA = {"rank": 4, "targets": ("q_proj", "down_proj")}
Case = tuple[str, str]
"""Strategy and feature."""
CASES: list[Case] = [
    *(("ddp", feature) for feature in FEATURES),
    *((strategy, "plain") for strategy in STRATEGIES if strategy != "ddp"),
    *product(("fsdp full", "zero3"), ("recomputed", "LoRA")),
]
IN_FULL = {
    ("ddp", "keeping attention"), ("ddp", "8 bits"), ("zero1", "plain"),
    ("fsdp full", "recomputed"), ("zero3", "LoRA"),
}  # fmt: skip
"""Cases left out of the quick tier, which has others that compile the same."""
BROKEN = {("zero3", "LoRA")}
"""Cases whose graphs are broken by hooks of frozen parameters within the block."""
VARIED: dict[Case, int] = {("ddp", "LoRA"): 3, ("fsdp full", "recomputed"): 2}
"""Case -> kinds of blocks: evaluated and trained, and with LoRA the first one, whose input needs no
gradient."""
FIRST = ((2, 16), (2, 12), (1, 16))
LATER = ((3, 20), (1, 9))
"""Samples and tokens of micro-batches, until everything is compiled, and then."""


class Squares(CrossEntropy):
    """Another loss: the square of each log-probability."""

    def __init__(self) -> None:
        super().__init__()
        self.request = ScoreRequest(tokens=True)

    def __call__(self, scores: Scores, batch: MicroBatch) -> LossParts:
        return LossParts(terms={"targets": scores.tokens.square().mean()})


def engines(
    dist: DistContext, folder: str, cases: list[Case], sizes: Any
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the engine of each case, its source, and torch's counts of what it compiles."""
    from torch._dynamo.utils import counters

    ctx = context(dist, folder)
    precision, plan = PrecisionPolicy(compute="bf16").run(ctx), AdamW(lr=1e-3).run(ctx)
    for strategy, feature in cases:
        torch._dynamo.reset()
        counters.clear()
        fields = {"compile": Compile(backend="aot_eager"), **FEATURES[feature]}
        source = tiny_source(ctx, LORA if feature == "LoRA" else None, fields, **sizes)
        engine = STRATEGIES[strategy].stage().run(ctx, source, precision, plan)
        yield engine, source, counters
        engine.close()


def compiled(dist: DistContext, folder: str, cases: list[Case]) -> list[tuple[int, list[Any], Any]]:
    """Train three steps of each case; return the number of compiled graphs, the reasons for graph
    breaks, and the last loss."""
    batch, found = micro_batch(torch.arange(16)[None], torch.arange(16)[None]), []
    for engine, _, counters in engines(dist, folder, cases, SIZES):
        loss = torch.zeros(())
        for _ in range(3):
            loss = accumulated(engine, [batch], 1, Squares())
            engine.step(lr_scales=[1.0])
        graphs = counters["stats"]["unique_graphs"]
        found.append((graphs, list(counters["graph_break"]), float(loss)))
    return found


def packed(samples: int, length: int) -> MicroBatch:
    """Return a micro-batch of two documents a sample."""
    ids = torch.arange(samples * length).view(samples, length) % 101
    places = (torch.arange(length) % (length // 2 + 1)).expand(samples, -1).contiguous()
    return micro_batch(ids, ids.clone(), positions=places)


def varied(dist: DistContext, folder: str) -> list[list[int]]:
    """Train and evaluate on packed samples of several shapes; return the numbers of graphs after
    each step until all is compiled. Whatever is compiled later raises."""
    found = []
    for engine, source, counters in engines(dist, folder, [*VARIED], DEEP):
        objective = CrossEntropy(5, compiled_by=source.compiled_by)
        graphs = []

        def train(shape: tuple[int, int], engine: Any = engine, by: Any = objective) -> None:
            accumulated(engine, [packed(*shape)], 1, by)
            engine.step(lr_scales=[1.0])
            evaluated(engine, [packed(*shape)], 5, by.request.compiled_by)

        for shape in FIRST:
            train(shape)
            graphs.append(counters["stats"]["unique_graphs"])
        with torch._dynamo.config.patch(error_on_recompile=True):
            for shape in LATER:
                train(shape)
        assert not counters["graph_break"]
        found.append(graphs)
    return found


@pytest.mark.full
def test_samples_of_any_shape_soon_share_graphs(tmp_path: Any) -> None:
    (found,) = run_ranks(varied, 1, str(tmp_path))
    loss = 2  # trained and evaluated, for chunks of any length
    for kinds, graphs in zip(VARIED.values(), found, strict=True):
        # The first shape, all others, and those of a single sample.
        assert graphs == [loss + kinds, loss + 2 * kinds, loss + 3 * kinds]


@pytest.mark.usefixtures("deepspeed_operators")
def test_blocks_of_a_kind_share_one_graph(tmp_path: Any) -> None:
    cases = [case for case in CASES if FULL or case not in IN_FULL]
    (results,) = run_ranks(compiled, 1, str(tmp_path), cases)
    found = dict(zip(cases, results, strict=True))
    for (strategy, feature), (graphs, breaks, loss) in found.items():
        # With LoRA the first block's input, of a frozen embedding, needs no gradient.
        wanted = 2 if feature == "LoRA" else 1
        if (strategy, feature) not in BROKEN:
            assert (graphs, breaks) == (wanted, []), (strategy, feature)
        assert loss == pytest.approx(found["ddp", feature][2], rel=5e-3), (strategy, feature)
