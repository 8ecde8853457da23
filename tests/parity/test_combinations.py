"""Every feature under every strategy gives the numbers of a plain loop, or is refused before a
start."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.parity.combinations import CONTAINED, FEATURES, STRATEGIES, case, refusal, table
from tests.parity.reference import assert_same_numbers, plain_loop, steps_of
from tests.support.strategies import STRATEGIES as ALL_STRATEGIES
from tests.support.tier import FULL, spread

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

KEEPING = ("- keeping attention", "- keeping matrix products")
DIVIDED = ("DoRA", "QLoRA", "DoRA, checkpointing", "QLoRA, DoRA, checkpointing, compiled")
REFUSED = {
    *product(KEEPING, ("ZeRO-3", "ZeRO-3, tensor 2")),
    *product(DIVIDED, ("FSDP, tensor 2", "ZeRO-3, tensor 2")),
}
CUT = (3, 1, 3, 1)
"""Samples in each micro-batch of a step: two ranks with four samples each, three at a time."""
FOR_FULL = ("ZeRO-1", "ZeRO-2", "FSDP, ", "ZeRO-3, ")
"""Beginnings of the names of strategies of the full tier only; test_parity.py has all."""
PAIRS = [
    (feature, strategy)
    for strategy, feature in product(STRATEGIES, FEATURES)
    if (feature, strategy) not in REFUSED
]
QUICK = [
    (feature, strategy)
    for feature, strategy in PAIRS
    if feature not in CONTAINED
    and not strategy.startswith(FOR_FULL)
    # Compiling takes half a minute because shapes change; test_compiled_blocks.py compiles.
    and "compiled" not in feature.split(", ")
]
THROUGH = list(
    product(spread(["QLoRA", "DoRA", "packing"], 1), ("accelerate ddp", "accelerate fsdp2"))
)
NAMES = {f"{f} under {s}": (f, s) for f, s in [*(PAIRS if FULL else QUICK), *THROUGH]}
CASES = {
    name: case(FEATURES[feature], (STRATEGIES | ALL_STRATEGIES)[strategy])
    for name, (feature, strategy) in NAMES.items()
}


def test_exactly_these_are_refused() -> None:
    refused = {(f, s) for f, s in product(FEATURES, STRATEGIES) if refusal(f, s)}
    assert refused == REFUSED


def test_the_documented_table_is_what_check_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text("utf-8")
    _, part, _ = re.split(r"<!-- /?combinations -->\n", page)
    assert part == table(), "python -m tests.parity.combinations"


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_a_plain_loop(name: str, trained: Callable[[str], Any]) -> None:
    result, feature = trained(name), FEATURES[NAMES[name][0]]
    expected = plain_loop(CASES[name], CUT if feature.rounds else None)
    if feature.rounds and result["facts"]["axes"]:  # scales are of other parts of a batch
        assert steps_of(result, "loss") == pytest.approx(expected[0], rel=2e-2)
        return
    # with rounding it is cut differently
    assert_same_numbers(result, expected, heldout=1e-2 if feature.rounds else 1e-5)


@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.lora])
def test_a_checkpoint_holds_only_the_adapter_s_state(
    name: str, trained: Callable[[str], Any]
) -> None:
    result = trained(name)
    (step,) = Path(result["folder"]).glob("checkpoints/step-*")
    size = sum(file.stat().st_size for file in step.iterdir())
    assert size <= 16 * result["facts"]["trained_parameters"] + 1_000_000
    assert all("lora" in key for key in load_file(f"{result['folder']}/final.safetensors"))
