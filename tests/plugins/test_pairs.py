"""An objective that is no sum over tokens, and columns of the data that it needs, by a plugin: the
numbers of a plain loop wherever tokens, layers and samples are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipeline.contracts.data import Sample
from pipeline.contracts.metrics import records
from pipeline.contracts.sample_order import SampleOrder
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from tests.parity.body import tiny_source
from tests.plugins.pairs.data import PairData, Pairs
from tests.plugins.pairs.train import TrainPairs
from tests.support.models import filled
from tests.support.moe import MOE, attention_of
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.strategies import Strategy
from tests.support.tier import spread

SEED, STEPS, BATCH, BETA, LIKELIHOOD, LR = 7, 3, 5, 0.1, 0.5, 1e-3
TENSOR, CONTEXT = {"tensor_parallel": {"size": 2}}, {"context_parallel": {"size": 2}}
TINY_PARTS = {"param_persistence_threshold": 100}


def staged(schedule: str) -> dict[str, Any]:
    whole = schedule in ("InterleavedZeroBubble", "ZBVZeroBubble")
    sharding = {"sharding": "shard_grad_op"} if whole else {}
    return {"pipeline_parallel": {"size": 2, "schedule": schedule}, **sharding}


LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ddp": (2, "wrap.ddp", {}),
    "ddp on three": (3, "wrap.ddp", {}),
    "ddp context": (2, "wrap.ddp", CONTEXT),
    "fsdp": (2, "wrap.fsdp", {}),
    "fsdp hybrid": (4, "wrap.fsdp", {"sharding": "hybrid_shard", "shard_size": 2}),
    "zero1": (2, "wrap.zero", {"stage": 1}),
    "zero2": (2, "wrap.zero", {"stage": 2}),
    "zero3": (2, "wrap.zero", {"stage": 3, **TINY_PARTS}),
    "zero3 context": (2, "wrap.zero", {"stage": 3, **CONTEXT, **TINY_PARTS}),
    "zero2 tensor": (2, "wrap.zero", {"stage": 2, **TENSOR}),
    "tensor": (2, "wrap.fsdp", TENSOR),
    "tensor context": (4, "wrap.fsdp", {**TENSOR, **CONTEXT}),
    "context data": (4, "wrap.fsdp", CONTEXT),
    "1F1B": (2, "wrap.fsdp", staged("1F1B")),
    "GPipe": (2, "wrap.fsdp", staged("GPipe")),
    "Interleaved1F1B": (2, "wrap.fsdp", staged("Interleaved1F1B")),
    "InterleavedZeroBubble": (2, "wrap.fsdp", staged("InterleavedZeroBubble")),
    "ZBVZeroBubble": (2, "wrap.fsdp", staged("ZBVZeroBubble")),
    "LoopedBFS": (2, "wrap.fsdp", staged("LoopedBFS")),
    "pipeline data": (4, "wrap.fsdp", staged("1F1B")),
    "pipeline context": (4, "wrap.fsdp", {**staged("1F1B"), **CONTEXT}),
    "pipeline tensor": (4, "wrap.fsdp", {**staged("1F1B"), **TENSOR}),
    "experts": (2, "wrap.fsdp", {"expert_parallel": {"size": 2}}),
    "experts context": (4, "wrap.fsdp", {"expert_parallel": {"size": 2}, **CONTEXT}),
    "experts pipeline": (4, "wrap.fsdp", {"expert_parallel": {"size": 2}, **staged("1F1B")}),
}
HOW: dict[str, dict[str, Any]] = {
    "apart": {},
    "packed": {"packing": True},
    "chunks": {"loss_chunk_size": 5},
    "packed, chunks": {"packing": True, "loss_chunk_size": 5},
    # One micro-batch: a pipeline adds fillers, as large as that.
    "at once": {"micro_batch_size": 5},
}
CASES = [
    (layout, how)
    for layout, (_, _, fields) in LAYOUTS.items()
    for how, given in HOW.items()
    # A backward in two halves does not go through a head in chunks (`pipe check` refuses it).
    if not (fields.get("sharding") == "shard_grad_op" and "loss_chunk_size" in given)
]
QUICK = spread(CASES, 10)


def model_fields(layout: str) -> dict[str, Any]:
    if "experts" in layout:
        return {"model": MOE["olmoe"], "hf": {"attention": attention_of(MOE["olmoe"])}}
    return {"model": {"num_hidden_layers": 4, "tie_word_embeddings": layout != "ZBVZeroBubble"}}


def source(ctx: Any, layout: str) -> Any:
    fields = model_fields(layout)
    return tiny_source(ctx, None, fields.get("hf"), **fields["model"])


def train_all(
    dist: DistContext, folder: str, cases: list[tuple[str, str]]
) -> list[list[dict[str, Any]]]:
    """Train one case after another in the same processes."""
    return [train(dist, f"{folder}/{layout}, {how}", layout, HOW[how]) for layout, how in cases]


def train(dist: DistContext, folder: str, layout: str, how: dict[str, Any]) -> list[dict[str, Any]]:
    """Train on pairs; return rank 0's records."""
    _, use, fields = LAYOUTS[layout]
    ctx = context(dist, folder, SEED)
    precision = PrecisionPolicy(compute="fp32", reduce="fp32").run(ctx)
    plan = AdamW(lr=LR, max_grad_norm=None, schedule="constant", weight_decay=0.0).run(ctx)
    model = source(ctx, layout)
    engine = Strategy(use=use, fields=fields).stage().run(ctx, model, precision, plan)
    checkpoints = ShardedCheckpoint().run(ctx, engine)
    given = dict(how)
    data = PairData(packing=given.pop("packing", False)).run(ctx)
    loop = TrainPairs(
        global_batch_size=BATCH, steps=STEPS, beta=BETA, likelihood=LIKELIHOOD,
        **{"micro_batch_size": 2, **given},
    )  # fmt: skip
    loop.run(ctx, engine, data, plan, checkpoints, model)
    checkpoints.close()
    engine.close()
    return list(records(ctx.run_dir / "metrics.jsonl"))


def documents(sample: Sample) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return ids, labels and weights of each row of a sample."""
    assert sample.positions is not None
    starts = (sample.positions == 0).nonzero()[0].tolist()
    columns = (sample.input_ids, sample.labels, sample.tokens["weight"])
    edges = list(zip(starts, [*starts[1:], len(sample.labels)], strict=True))
    return [
        tuple(torch.from_numpy(one[start:end]) for one in columns)  # type: ignore[misc]
        for start, end in edges
    ]


def plain_loop(layout: str, packed: bool, folder: Path) -> tuple[list[float], list[float], float]:
    """Train in a loop of plain torch, a row at a time; return losses, gradient norms, and the mean
    loss of held-out tokens at the end."""
    ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
    model = filled(source(ctx, layout)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    samples, order = Pairs(24, 101, packed), SampleOrder(SEED, 24)
    losses, norms = [], []

    def log_probs(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        return -F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")

    for step in range(STEPS):
        pairs, likelihoods, targets = [], [], 0
        for index in order.indices(step * BATCH, BATCH).tolist():
            sample = samples[index]
            rows = documents(sample)
            gains = []
            for (ids, labels, weight), own in zip(rows, sample.rows["reference"], strict=True):
                scores = log_probs(ids, labels)
                gains.append(scores.sum() - float(own))
                targets += int((labels != -100).sum())
                if len(gains) % 2:
                    likelihoods.append((scores * weight).sum())
            pairs += [-F.logsigmoid(BETA * (a - b)) for a, b in zip(gains[::2], gains[1::2])]  # noqa: B905
        loss = torch.stack(pairs).mean() - LIKELIHOOD * torch.stack(likelihoods).sum() / targets
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    heldout = Pairs(5, 101, packed, first=1000)
    with torch.no_grad():
        rows = [row for index in range(5) for row in documents(heldout[index])]
        nats = sum(-float(log_probs(ids, labels).sum()) for ids, labels, _ in rows)
    return losses, norms, nats / sum(int((labels != -100).sum()) for _, labels, _ in rows)


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Any]:
    """Train a case, and with it all that are wanted of the same ranks and engine."""
    own = [item for item in request.session.items if item.fspath == request.node.fspath]
    wanted = [tuple(item.callspec.params.values()) for item in own]
    known: dict[tuple[str, str], Any] = {}

    def find(layout: str, how: str) -> Any:
        if (layout, how) not in known:
            ranks, use, _ = LAYOUTS[layout]
            alike = [case for case in wanted if LAYOUTS[case[0]][:2] == (ranks, use)]
            folder = str(tmp_path_factory.mktemp("pairs"))
            found = run_ranks(train_all, ranks, folder, alike, limit=900)[0]
            known.update(zip(alike, found, strict=True))
        return known[layout, how]

    return find


@pytest.mark.parametrize(("layout", "how"), QUICK)
def test_pairs_have_the_numbers_of_a_plain_loop(
    layout: str, how: str, trained: Callable[[str, str], Any], tmp_path: Path
) -> None:
    losses, norms, heldout = plain_loop(layout, HOW[how].get("packing", False), tmp_path)
    found = trained(layout, how)
    steps = [one for one in found if "loss" in one]
    assert [one["loss"] for one in steps] == pytest.approx(losses, rel=1e-6)
    assert [one["grad_norm"] for one in steps] == pytest.approx(norms, rel=1e-6)
    evaluated = [one["eval_loss"] for one in found if "eval_loss" in one]
    assert evaluated == pytest.approx([heldout], rel=1e-6)
    assert [one["wrong_columns"] for one in steps] == [0.0] * STEPS
