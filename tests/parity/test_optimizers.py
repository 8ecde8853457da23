"""Every optimizer under every strategy against a plain loop over whole parameters."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.distributed.process_group import DistContext
from stages.optimizer.lion import Lion
from stages.optimizer.settings import GroupSettings
from tests.parity.body import ADAMW, BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.reference import CLIP, DECAY, WARMUP, reference
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.strategies import STRATEGIES, having
from tests.support.tier import spread

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

MODEL = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96}
"""Sizes with which some parameters, and their shards, are large enough for blocks."""
GROUPS = (
    GroupSettings(match=("*.embed_tokens.*",), lr_ratio=0.1, weight_decay=0.0),
    GroupSettings(match=("*.q_proj.*", "*norm*"), lr_ratio=3.0, weight_decay=0.2),
)
LION = Lion(lr=1e-4, weight_decay=DECAY, warmup_steps=WARMUP, max_grad_norm=CLIP)
OPTIMIZERS: dict[str, tuple[Any, float, float]] = {
    "lion": (LION, 1e-6, 3e-4),
    "groups": (replace(ADAMW, groups=GROUPS), 1e-6, 1e-4),
    "bf16 moments": (replace(ADAMW, moments="bf16", kernel="single"), 1e-5, 1e-3),
    "8bit": (replace(ADAMW, moments="8bit", kernel="single"), 1e-4, 2e-1),
}
"""Optimizer, and the mean and largest error accepted in weights. Where a sum of gradients is about
zero, the sign that Lion takes of it depends on the order of summation. Shards divide into other
blocks, so a small second moment can round to 0 in one of them only: single updates are then far
apart."""


def train_cases(dist: DistContext, folder: str, cases: dict[str, Any]) -> dict[str, Any]:
    """Train each case in its own folder, in one process group."""
    results = {}
    for name, case in cases.items():
        Path(folder, name).mkdir(exist_ok=True)
        results[name] = train_case(dist, f"{folder}/{name}", case)
    return results


@functools.cache
def plain_loop(name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
        source, plan = tiny_source(ctx, **MODEL), OPTIMIZERS[name][0].run(ctx)
    return reference(source, toy_data(), seed=SEED, steps=STEPS, batch=BATCH, plan=plan)


@pytest.mark.parametrize("name", spread(list(having("basic")), 2))
def test_an_optimizer_gives_the_numbers_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    wrap, fields = STRATEGIES[name].use, dict(STRATEGIES[name].fields)
    cases = {
        optimizer: {
            "wrap": wrap, "fields": fields, "batching": {"micro_batch_size": 2},
            "model": MODEL, "optimizer": stage,
        }
        for optimizer, (stage, *_) in OPTIMIZERS.items()
    }  # fmt: skip
    results = run_ranks(train_cases, 2, str(tmp_path), cases)[0]
    for optimizer, (_, mean, largest) in OPTIMIZERS.items():
        losses, norms, weights, _ = plain_loop(optimizer)
        steps = [record for record in results[optimizer]["records"] if "loss" in record]
        assert [r["loss"] for r in steps] == pytest.approx(losses, rel=mean * 10), optimizer
        assert [r["grad_norm"] for r in steps] == pytest.approx(norms, rel=mean * 100), optimizer
        final = load_file(tmp_path / optimizer / "final.safetensors")
        for key, weight in weights.items():
            wrong = (final[key] - weight).abs()
            assert float(wrong.mean()) < mean, f"{optimizer} {key}"
            assert float(wrong.max()) < largest, f"{optimizer} {key}"
