"""Axes that processes, models and the rest of a recipe do not allow."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.testing import plan_view
from stages.model.hf import HfModel
from stages.precision.policy import PrecisionPolicy
from stages.train.causal_lm import TrainCausalLm
from stages.wrap.axes import ContextParallel, ExpertParallel, PipelineParallel, TensorParallel
from stages.wrap.fsdp import Fsdp

TWO = {"pipeline_parallel": PipelineParallel(size=2)}
HYBRID = {"sharding": "hybrid_shard", "tensor_parallel": TensorParallel(size=2)}
EXPERTS = {"expert_parallel": ExpertParallel(size=4)}
HEADS = "context_parallel.size: the model has 6 attention heads, which do not divide among 4 ranks"
CONFIG = {"model_type": "llama", "num_attention_heads": 6, "num_hidden_layers": 5}


def problems(
    procs: int, fields: dict[str, Any], train: TrainCausalLm | None = None, **before: Any
) -> list[str]:
    wrap = Fsdp(**fields)
    after = {} if train is None else {"train": train}
    found = wrap.check(plan_view({**before, "wrap": wrap, **after}, procs=procs))
    return [f"{problem.key}: {problem.message}" for problem in found]


@pytest.mark.parametrize(
    ("procs", "fields", "expected"),
    [
        (
            8, {"tensor_parallel": TensorParallel(size=3)},
            ["tensor_parallel.size: 8 processes do not divide into groups of 3"],
        ),
        (
            8, {**TWO, "context_parallel": ContextParallel(size=8)},
            ["context_parallel.size: 4 of 8 processes do not divide into groups of 8"],
        ),
        (16, {**TWO, "context_parallel": ContextParallel(size=8)}, []),
        (16, {**HYBRID, "shard_size": 8}, []),
        (
            16, {**HYBRID, "shard_size": 16},
            ["shard_size: 8 of 16 processes do not divide into groups of 16"],
        ),
    ],
)  # fmt: skip
def test_processes_that_do_not_divide(
    procs: int, fields: dict[str, Any], expected: list[str]
) -> None:
    assert problems(procs, fields) == expected


@pytest.mark.parametrize(
    ("fields", "config", "expected"),
    [
        ({"context_parallel": ContextParallel(size=4)}, {}, HEADS),
        (
            {"tensor_parallel": TensorParallel(size=2),
             "context_parallel": ContextParallel(size=2)}, {}, HEADS,
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
        (EXPERTS, {}, "expert_parallel: the model has no experts"),
        (
            EXPERTS, {"num_experts": 6},
            "expert_parallel.size: the model's 6 experts do not divide among 4 ranks",
        ),
        (EXPERTS, {"num_experts": 8}, None),
        (
            {**EXPERTS, "sharding": "hybrid_shard"}, {"num_experts": 8},
            "shard_size: is required with expert_parallel",
        ),
    ],
)  # fmt: skip
def test_models_that_do_not_divide(
    fields: dict[str, Any], config: dict[str, Any], expected: str | None
) -> None:
    model = HfModel(config={**CONFIG, **config}, init="random")
    assert problems(8, fields, model=model) == ([] if expected is None else [expected])


def test_what_no_rank_has_all_of_is_refused() -> None:
    train = TrainCausalLm(global_batch_size=8, steps=1, router_loss=0.01)
    (found,) = problems(8, {"context_parallel": ContextParallel(size=2)}, train)
    assert "the train slot's router_loss is of all tokens" in found
    policy = PrecisionPolicy(compute="bf16", reduce="fp16")
    (found,) = problems(8, {"expert_parallel": ExpertParallel(size=2)}, precision=policy)
    assert found == "expert_parallel: gradients of experts cannot be averaged in fp16"


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
    block = PipelineParallel(size=2, schedule=schedule, **fields)
    found = problems(4, {"pipeline_parallel": block})
    assert any(expected in one for one in found) if expected else found == []
