"""Recipes with axes beside the data-parallel one train a tiny model, on groups of two ranks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.chain.plan import plan_file
from pipeline.contracts.metrics import records
from pipeline.distributed.process_group import DistContext
from stages.wrap.fsdp import Fsdp
from tests.support.moe import MOE
from tests.support.processes import run_ranks
from tests.support.runs import TINY, context, toy_data
from tests.support.tier import spread

FOLDER = Path(__file__).parents[2] / "recipes"
LLAMA = {**TINY, "intermediate_size": 40, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama405b_3d": LLAMA,
    "llama70b_tp_fsdp": LLAMA,
    "llama8b_1m_context": LLAMA,
    "qwen3_moe_ep": {**MOE["qwen3_moe"], "num_experts": 4},
}
"""Recipe -> config of the model that it trains here."""
AXES = ("pipeline_parallel", "tensor_parallel", "context_parallel", "expert_parallel")
SHORT = {
    "epochs": None, "steps": 3, "global_batch_size": 4, "micro_batch_size": 1, "eval_every": None,
}  # fmt: skip


def halved(wrap: Fsdp) -> Fsdp:
    """Return the stage with axes of two ranks."""
    asked = {name: getattr(wrap, name) for name in AXES}
    blocks = {name: block for name, block in asked.items() if block is not None}
    return dataclasses.replace(
        wrap, **{name: dataclasses.replace(block, size=2) for name, block in blocks.items()}
    )


def train_tiny(dist: DistContext, folder: str, name: str, plain: bool) -> list[float]:
    """Train by the recipe's stages up to `train`; `plain` without its axes. Return the losses."""
    plan = plan_file(FOLDER / f"{name}.yaml", (), for_this_machine=False)
    stages: dict[str, Any] = {step.slot: step.stage for step in plan.slots}
    ctx = context(dist, folder)
    model = {"path": None, "revision": None, "config": MODELS[name], "init": "random"}
    source = dataclasses.replace(stages["model"], **model).run(ctx)
    precision, optimizer = stages["precision"].run(ctx), stages["optimizer"].run(ctx)
    wrap = Fsdp() if plain else halved(stages["wrap"])
    engine = wrap.run(ctx, source, precision, optimizer)
    checkpoints = stages["checkpoint"].run(ctx, engine, source)
    loop = dataclasses.replace(stages["train"], **SHORT)
    loop.run(ctx, engine, toy_data(), optimizer, checkpoints, source)
    checkpoints.close()
    engine.close()
    found = records(ctx.run_dir / "metrics.jsonl") if dist.is_main else []
    return [record["loss"] for record in found if "loss" in record]


@pytest.mark.parametrize(
    ("name", "ranks"),
    spread(
        [
            ("qwen3_moe_ep", 2), ("llama405b_3d", 4), ("llama70b_tp_fsdp", 2),
            ("llama8b_1m_context", 2),
        ],
        2,
    ),
)  # fmt: skip
def test_a_tiny_model_is_trained_as_without_the_axes(name: str, ranks: int, tmp_path: Path) -> None:
    losses = run_ranks(train_tiny, ranks, str(tmp_path / "axes"), name, False)[0]
    plain = run_ranks(train_tiny, 1, str(tmp_path / "plain"), name, True)[0]
    assert losses[0] == pytest.approx(math.log(101), rel=0.05)
    assert losses == pytest.approx(plain, rel=2e-3)  # of bf16
