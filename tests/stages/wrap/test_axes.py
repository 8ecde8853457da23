"""The layout of ranks on axes, and what is silently wrong where one axis is taken for all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.testing import plan_view
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.train.causal_lm import TrainCausalLm
from stages.wrap.axes import Axes, PipelineParallel, TensorParallel, layer_ranges
from stages.wrap.fsdp import Fsdp
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
    assert {place.stream for place in places} == set(range(axes.ranks // tensor))
    stage = [place.pipeline for place in places]
    assert stage == sorted(stage)


def test_shards_are_of_what_the_axes_leave() -> None:
    node = Fsdp(sharding="hybrid_shard")
    assert node.shards(Axes(data=16), 8) == 8
    assert node.shards(Axes(data=8, tensor=2), 8) == 4
    assert node.shards(Axes(pipeline=8, data=2), 8) == 2


def test_samples_are_divided_among_the_ranks_that_are_left() -> None:
    wrap = Fsdp(tensor_parallel=TensorParallel(size=2), pipeline_parallel=PipelineParallel(size=2))
    stage = TrainCausalLm(global_batch_size=12, steps=1, micro_batch_size=2, accumulation=2)
    plan = plan_view({"wrap": wrap, "train": stage}, procs=8)
    assert plan.data_ranks(stage) == 2
    (problem,) = stage.check(plan)
    assert (
        "micro_batch_size x accumulation x data-parallel ranks = 2 x 2 x 2 = 8" in problem.message
    )


def drawn(dist: DistContext, folder: str) -> tuple[list[float], list[str]]:
    """Save with four data-parallel ranks and go on with two tensor-parallel groups, and with two
    stages, on nodes of one process; return a number that each draws then, and warnings."""
    ctx, nodes = context(dist, folder), context(replace(dist, local_world_size=1), folder)
    said, numbers = list[str](), list[float]()
    nodes.log.warning = lambda text, *values: said.append(text % values)  # type: ignore[method-assign]
    for wrap in ("fsdp full", "fsdp tensor", "fsdp pipeline"):
        engine = make_engine(nodes, Setting(wrap=wrap))
        checkpoints = ShardedCheckpoint().run(ctx, engine)
        if checkpoints.restore(lambda progress: None) is None:
            torch.manual_seed(dist.rank)
            train(engine, 0, 1)
            checkpoints.save(Progress(step=1, samples=12))
            checkpoints.finish()
        numbers.append(float(torch.rand(())))
        checkpoints.close()
        engine.close()
    return numbers[1:], said


def test_partners_draw_alike_where_four_ranks_become_two_groups(tmp_path: Path) -> None:
    """The number of ranks is the same, so their states might be taken for those of these ranks."""
    found = run_ranks(drawn, 4, str(tmp_path))
    numbers, of_stages = zip(*(own for own, _ in found), strict=True)
    assert numbers[0] == numbers[1]
    assert numbers[2] == numbers[3]
    assert numbers[0] != numbers[2]
    assert len({*of_stages}) == 4
    assert found[0][1] == [
        "tensor_parallel: groups of 2 ranks reach over nodes of 1, and exchange activations in "
        "every layer"
    ]


def test_the_head_counts_as_the_blocks_that_it_takes_as_long_as() -> None:
    def sizes(*args: Any) -> list[int]:
        return [len(one) for one in layer_ranges(*args)]

    assert sizes(32, 4, 128256 * 4096, 218_112_000) == [8, 9, 9, 6]  # Llama-3.1-8B
    assert sizes(126, 16, 66, 100) == [7, *14 * [8], 7]
    assert sizes(5, 2, 2, 5) == [3, 2]
    assert sizes(4, 4, 9, 1) == [1, 1, 1, 1]
    assert sizes(7, 3) == [2, 3, 2]
    assert [range(2), range(2, 3)] == layer_ranges(3, 2, 1, 2)
