"""Every optimizer under every strategy against a plain loop over whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from safetensors.torch import load_file

from stages.optimizer import GroupSettings, Lion
from tests.parity.body import ADAMW, CLIP, DECAY, WARMUP, Case
from tests.parity.reference import plain_loop, steps_of
from tests.support.strategies import having
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
CASES = {
    f"{optimizer} under {name}": Case(
        wrap=one.use, fields=one.fields, model=MODEL, optimizer=OPTIMIZERS[optimizer][0]
    )
    for name, one in having("basic").items()
    if name in spread(list(having("basic")), 2)
    for optimizer in OPTIMIZERS
}


@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_gives_the_numbers_of_a_plain_loop(
    name: str, trained: Callable[[str], Any]
) -> None:
    _, mean, largest = OPTIMIZERS[name.partition(" under ")[0]]
    losses, norms, weights, _ = plain_loop(CASES[name])
    result = trained(name)
    assert steps_of(result, "loss") == pytest.approx(losses, rel=mean * 10)
    assert steps_of(result, "grad_norm") == pytest.approx(norms, rel=mean * 100)
    final = load_file(f"{result['folder']}/final.safetensors")
    for key, weight in weights.items():
        wrong = (final[key] - weight).abs()
        assert float(wrong.mean()) < mean, key
        assert float(wrong.max()) < largest, key
