"""The layout of ranks on axes, and what is silently wrong where one axis is taken for all."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.engine import StepReport
from pipeline.contracts.objective import Scores
from pipeline.contracts.plan_view import PlanView
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.testing import plan_view
from stages.batches.feed import BatchStats
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.model.hf import HfModel
from stages.objectives.cross_entropy import CrossEntropy, RowLoss
from stages.objectives.judge import StepSums
from stages.precision.policy import PrecisionPolicy
from stages.train.causal_lm import TrainCausalLm
from stages.train.flops import Cost
from stages.train.meter import StepMeter
from stages.train.profiling import Profiler
from stages.train.step import StepResult
from stages.wrap.axes import (
    Axes,
    ContextParallel,
    ExpertParallel,
    PipelineParallel,
    TensorParallel,
)
from stages.wrap.fsdp import Fsdp
from stages.wrap.passes import ModulePasses
from stages.wrap.pipeline.split import layer_ranges
from tests.support.batches import micro_batch
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import Setting, make_engine, train

sizes = st.integers(1, 4)


@given(pipeline=sizes, data=sizes, context_=sizes, tensor=sizes)
def test_every_rank_has_a_place_of_its_own(
    pipeline: int, data: int, context_: int, tensor: int
) -> None:
    axes = Axes(pipeline=pipeline, data=data, context=context_, tensor=tensor)
    places = [axes.coordinates(rank) for rank in range(axes.ranks)]
    assert len({(p.pipeline, p.data.index, p.context, p.tensor) for p in places}) == axes.ranks
    for first in range(0, axes.ranks, tensor):  # neighbours share layers, and a stream
        group = places[first : first + tensor]
        assert [place.tensor for place in group] == list(range(tensor))
        assert len({place.stream for place in group}) == 1
    assert {place.stream for place in places} == set(range(axes.streams))
    stage = [place.pipeline for place in places]
    assert stage == sorted(stage)


def view(procs: int, **slots: Any) -> PlanView:
    return plan_view(slots, procs=procs)


def problems(procs: int, **fields: Any) -> list[str]:
    wrap = Fsdp(**fields)
    return [f"{p.key}: {p.message}" for p in wrap.check(view(procs, wrap=wrap))]


def test_processes_that_do_not_divide_are_refused() -> None:
    assert problems(8, tensor_parallel=TensorParallel(size=3)) == [
        "tensor_parallel.size: 8 processes do not divide into groups of 3"
    ]
    both = {
        "pipeline_parallel": PipelineParallel(size=2),
        "context_parallel": ContextParallel(size=8),
    }
    assert problems(8, **both) == [
        "context_parallel.size: 4 of 8 processes do not divide into groups of 8"
    ]
    assert problems(16, **both) == []


def test_shards_are_of_what_the_axes_leave() -> None:
    hybrid = {"sharding": "hybrid_shard", "tensor_parallel": TensorParallel(size=2)}
    assert problems(16, **hybrid, shard_size=8) == []
    assert problems(16, **hybrid, shard_size=16) == [
        "shard_size: 8 of 16 processes do not divide into groups of 16"
    ]
    node = Fsdp(sharding="hybrid_shard")
    assert node.shards(Axes(data=16), 8) == 8
    assert node.shards(Axes(data=8, tensor=2), 8) == 4
    assert node.shards(Axes(pipeline=8, data=2), 8) == 2


CONFIG = {"model_type": "llama", "num_attention_heads": 6, "num_hidden_layers": 5}


@pytest.mark.parametrize(
    ("fields", "config", "expected"),
    [
        (
            {"context_parallel": ContextParallel(size=4)}, {},
            "context_parallel.size: the model has 6 attention heads, which do not divide among 4 "
            "ranks",
        ),
        (
            {"tensor_parallel": TensorParallel(size=2),
             "context_parallel": ContextParallel(size=2)}, {},
            "context_parallel.size: the model has 6 attention heads, which do not divide among 4 "
            "ranks",
        ),
        ({"tensor_parallel": TensorParallel(size=2)}, {}, None),
        (
            {"pipeline_parallel": PipelineParallel(size=4, schedule="Interleaved1F1B")}, {},
            "pipeline_parallel.size: the model's 5 blocks do not make 8 pipeline stages",
        ),
        ({"pipeline_parallel": PipelineParallel(size=4)}, {}, None),
        (
            {"sharding": "shard_grad_op",
             "pipeline_parallel": PipelineParallel(size=2, schedule="ZBVZeroBubble")},
            {"tie_word_embeddings": True},
            "pipeline_parallel.schedule: ZBVZeroBubble puts the first and the last pipeline stage "
            "on one rank, and the model's head shares the embedding's weight",
        ),
        (
            {"expert_parallel": ExpertParallel(size=4)}, {},
            "expert_parallel: the model has no experts",
        ),
        (
            {"expert_parallel": ExpertParallel(size=4)}, {"num_experts": 6},
            "expert_parallel.size: the model's 6 experts do not divide among 4 ranks",
        ),
        ({"expert_parallel": ExpertParallel(size=4)}, {"num_experts": 8}, None),
        (
            {"expert_parallel": ExpertParallel(size=4), "sharding": "hybrid_shard"},
            {"num_experts": 8},
            "shard_size: is required with expert_parallel",
        ),
    ],
)  # fmt: skip
def test_axes_divide_the_model(
    fields: dict[str, Any], config: dict[str, Any], expected: str | None
) -> None:
    model = HfModel(config={**CONFIG, **config}, init="random")
    wrap = Fsdp(**fields)
    found = [f"{p.key}: {p.message}" for p in wrap.check(view(8, model=model, wrap=wrap))]
    assert found == ([] if expected is None else [expected])


def test_what_no_rank_has_all_of_is_refused() -> None:
    train = TrainCausalLm(global_batch_size=8, steps=1, router_loss=0.01)
    wrap = Fsdp(context_parallel=ContextParallel(size=2))
    (problem,) = wrap.check(view(8, wrap=wrap, train=train))
    assert problem.message.startswith("the train slot's router_loss is of all tokens")
    wrap = Fsdp(expert_parallel=ExpertParallel(size=2))
    policy = PrecisionPolicy(compute="bf16", reduce="fp16")
    (problem,) = wrap.check(view(8, precision=policy, wrap=wrap))
    assert problem.message == "gradients of experts cannot be averaged in fp16"


def test_the_head_counts_as_the_blocks_that_it_takes_as_long_as() -> None:
    def sizes(*args: Any) -> list[int]:
        return [len(one) for one in layer_ranges(*args)]

    assert sizes(32, 4, 128256 * 4096, 218_112_000) == [8, 9, 9, 6]  # Llama-3.1-8B
    assert sizes(126, 16, 66, 100) == [7, *14 * [8], 7]
    assert sizes(5, 2, 2, 5) == [3, 2]
    assert sizes(4, 4, 9, 1) == [1, 1, 1, 1]
    assert sizes(7, 3) == [2, 3, 2]
    assert [range(2), range(2, 3)] == layer_ranges(3, 2, 1, 2)


def test_samples_are_divided_among_the_ranks_that_are_left() -> None:
    wrap = Fsdp(tensor_parallel=TensorParallel(size=2), pipeline_parallel=PipelineParallel(size=2))
    train_stage = TrainCausalLm(global_batch_size=12, steps=1, micro_batch_size=2, accumulation=2)
    plan = view(8, wrap=wrap, train=train_stage)
    assert plan.data_ranks(train_stage) == 2
    (problem,) = train_stage.check(plan)
    assert (
        "micro_batch_size x accumulation x data-parallel ranks = 2 x 2 x 2 = 8" in problem.message
    )


@pytest.mark.parametrize(
    ("schedule", "fields", "expected"),
    [
        ("1F1B", {"stages_per_rank": 2}, "1F1B has one stage a rank"),
        ("ZBVZeroBubble", {"stages_per_rank": 4}, "ZBVZeroBubble has two stages a rank"),
        ("ZBVZeroBubble", {}, "needs parameters that stay gathered until backward"),
        ("1F1B", {}, None),
    ],
)
def test_schedules_that_cannot_be(schedule: Any, fields: Any, expected: str | None) -> None:
    found = problems(4, pipeline_parallel=PipelineParallel(size=2, schedule=schedule, **fields))
    assert any(expected in one for one in found) if expected else found == []


def build_engine(dist: DistContext, folder: str) -> list[str]:
    """Return what rank 0 logs while a tensor-parallel engine is built, on nodes of one process."""
    ctx = context(replace(dist, local_world_size=1, local_rank=0), folder)
    said: list[str] = []
    ctx.log.warning = lambda text, *values: said.append(text % values)  # type: ignore[method-assign]
    make_engine(ctx, Setting(wrap="fsdp tensor")).close()
    return said


def test_layers_that_are_divided_over_nodes_are_told(tmp_path: Path) -> None:
    assert run_ranks(build_engine, 2, str(tmp_path))[0] == [
        "tensor_parallel: groups of 2 ranks reach over nodes of 1, and exchange activations in "
        "every layer"
    ]


def three(own: Any, whole: Any, request: Any) -> Scores:
    """Score the two tokens of a micro-batch."""
    return Scores(total=torch.tensor(-3.0), tokens=torch.tensor([[-1.0, -2.0]]))


@pytest.mark.parametrize("axes", [Axes(data=2, tensor=2), Axes(data=2, context=2)])
def test_a_loss_that_a_group_computes_alike_counts_once(axes: Axes) -> None:
    parts, rows = [], []
    ids = torch.zeros(1, 2, dtype=torch.int64)
    for rank in range(4):
        dist = DistContext(rank=rank, world_size=4, device=torch.device("cpu"))
        passes = ModulePasses(torch.nn.Linear(1, 1), three, dist, axes)
        sums = StepSums(CrossEntropy(), dist.device, {"targets": 1}, factor=1.0)
        found = passes.train(
            [micro_batch(ids, ids)], sums, lambda last: nullcontext(), lambda loss: None
        )
        parts.append(float(found.terms["targets"]))
        rows += passes.evaluate([micro_batch(ids, ids)], RowLoss())
    assert parts == [3.0, 0.0, 3.0, 0.0]
    assert [None if one is None else one.tolist() for one in rows] == [[[3.0]], None] * 2


def test_tokens_of_a_group_count_once_and_its_devices_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices run two shares of samples: 14 tokens, not 28."""
    others = 3  # whose sums are like this rank's, but for the loss
    engine: Any = SimpleNamespace(
        data_axis=SimpleNamespace(count=2), device=torch.device("cpu"),
        total=lambda sums: sums + others * torch.cat([torch.zeros(1), sums[1:]]),
    )  # fmt: skip
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
    dist = DistContext(rank=0, world_size=4, device=torch.device("cpu"))
    meter = StepMeter(engine, dist, Progress(), Cost(multiplied=1.0, attention=0.0, peak=1.0))
    report = StepReport(grad_norm=1.0, applied=True)
    done = StepResult(report=report, rates={"lr": 0.1}, stats=BatchStats(tokens=7), anomaly="")
    meter.observe(torch.tensor(2.0), done.stats, {})
    record = meter.record(meter.end(done, Progress(), Progress(step=1)))
    tokens = record["tokens_per_second"] * record["step_seconds"]
    assert tokens == pytest.approx(14)
    assert record["mfu"] * record["step_seconds"] == pytest.approx(14 / 4)
    assert record["tokens_per_second_per_rank"] == pytest.approx(record["tokens_per_second"] / 4)


def test_each_rank_writes_a_profile_of_its_own(tmp_path: Path) -> None:
    engine: Any = SimpleNamespace(
        data_axis=SimpleNamespace(index=0, count=1), device=torch.device("cpu"),
        total=lambda values: values,
    )  # fmt: skip
    for rank in range(2):
        dist = DistContext(rank=rank, world_size=2, device=torch.device("cpu"))
        Profiler([1], tmp_path / "profile", engine, dist).run(
            1, lambda: torch.ones(2) @ torch.ones(2)
        )
    assert len(list((tmp_path / "profile").iterdir())) == 2


def streams(dist: DistContext, folder: str, wrap: str) -> list[float]:
    """Save with four data-parallel ranks, or go on under another layout; draw a number."""
    ctx = context(dist, folder)
    engine = make_engine(ctx, Setting(wrap=wrap))
    checkpoints = ShardedCheckpoint().run(ctx, engine)
    restored = checkpoints.restore(lambda progress: None)
    if restored is None:
        torch.manual_seed(dist.rank)
        train(engine, 0, 1)
        checkpoints.save(Progress(step=1, samples=12))
        checkpoints.finish()
    drawn = float(torch.rand(()))
    checkpoints.close()
    engine.close()
    return [drawn]


def test_partners_draw_alike_where_four_ranks_become_two_groups(tmp_path: Path) -> None:
    """The number of ranks is the same, so their states might be taken for those of these ranks."""
    run_ranks(streams, 4, str(tmp_path), "fsdp full")
    drawn = [number for (number,) in run_ranks(streams, 4, str(tmp_path), "fsdp tensor")]
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert drawn[0] != drawn[2]


def test_stages_of_a_pipeline_draw_otherwise(tmp_path: Path) -> None:
    first, second = run_ranks(streams, 2, str(tmp_path), "fsdp pipeline")
    assert first != second
