"""Every feature under every strategy gives the numbers of a plain loop, or is refused before a
start."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.distributed.process_group import DistContext
from tests.parity.body import BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.combinations import (
    CONTAINED,
    FEATURES,
    RANKS,
    SIZES,
    STRATEGIES,
    case,
    model_fields,
    refusal,
    table,
)
from tests.parity.reference import reference
from tests.support.processes import run_ranks
from tests.support.runs import context, packed_data, toy_data
from tests.support.strategies import STRATEGIES as ALL_STRATEGIES
from tests.support.tier import FULL, spread

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

REFUSED = {
    *((f"- keeping {what}", strategy)
      for what in ("attention", "matrix products")
      for strategy in ("ZeRO-3", "ZeRO-3, tensor 2")),
    *((name, strategy)
      for name in (
          "DoRA", "QLoRA", "DoRA, checkpointing", "QLoRA, DoRA, checkpointing, compiled",
      )
      for strategy in ("FSDP, tensor 2", "ZeRO-3, tensor 2")),
}  # fmt: skip
SLOW = {
    (name, strategy)
    for name in FEATURES
    for strategy in STRATEGIES
    if "compiled" in name.split(", ")
}
"""Features that compile for half a minute because shapes change; test_compiled_blocks.py compiles
under all strategies."""
CUT = (3, 1, 3, 1)
"""Samples in each micro-batch of a step: two ranks with four samples each, three at a time."""
TRAINED = [name for name in FEATURES if FULL or name not in CONTAINED]
"""Features of the quick tier, without the ones that others contain."""
LEFT_OUT = REFUSED if FULL else REFUSED | SLOW
PAIRS = [(feature, strategy) for strategy in STRATEGIES for feature in FEATURES]


def test_exactly_these_are_refused() -> None:
    refused = {(f, s) for f, s in PAIRS if refusal(FEATURES[f], STRATEGIES[s])}
    assert refused == REFUSED


def test_the_documented_table_is_what_check_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text("utf-8")
    _, part, _ = re.split(r"<!-- /?combinations -->\n", page)
    assert part == table(), "python -m tests.parity.combinations"


def train_all(dist: DistContext, folder: str, cases: dict[str, Any]) -> dict[str, Any]:
    """Train one case after another in the same processes."""
    results = {}
    for number, (name, one) in enumerate(cases.items()):
        place = f"{folder}/{number}"
        Path(place).mkdir(exist_ok=True)
        results[name] = {**train_case(dist, place, one), "folder": place}
    return results


FOR_FULL = ("ZeRO-1", "ZeRO-2", "FSDP, ", "ZeRO-3, ")
"""Beginnings of the names of strategies of the full tier only; test_parity.py has all."""
ALWAYS = [name for name in STRATEGIES if FULL or not name.startswith(FOR_FULL)]


@pytest.fixture(scope="module", params=ALWAYS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of every feature under one strategy."""
    strategy = STRATEGIES[request.param]
    cases = {
        name: case(feature, strategy)
        for name, feature in FEATURES.items()
        if name in TRAINED
        and (name, request.param) not in LEFT_OUT
        and not refusal(feature, strategy)
    }
    folder = tmp_path_factory.mktemp("combinations")
    return run_ranks(train_all, RANKS, str(folder), cases, limit=900)[0]


@functools.cache
def plain_loop(adapter: str, packed: bool, rounded: str) -> Any:
    """Return the reference; `rounded` is the feature whose model it uses, if not the plain one."""
    lora = FEATURES[adapter].adapter if adapter else None
    fields = model_fields(FEATURES[rounded]) if rounded else None
    with tempfile.TemporaryDirectory() as folder:
        ctx = context(DistContext(device=torch.device("cpu")), folder, SEED)
        source = tiny_source(ctx, lora, fields, **SIZES)
        source = source if rounded else source.inference_view
        data = packed_data() if packed else toy_data()
        together = CUT if rounded else None
        return reference(source, data, seed=SEED, steps=STEPS, batch=BATCH, together=together)


def expected(name: str) -> Any:
    feature = FEATURES[name]
    same = (other for other, one in FEATURES.items() if one.adapter == feature.adapter)
    adapter = next(same) if feature.adapter else ""
    return plain_loop(adapter, feature.packed, name if feature.rounds else "")


@pytest.mark.parametrize("name", TRAINED)
def test_the_numbers_of_a_plain_loop(name: str, trained: Any) -> None:
    if name not in trained:
        pytest.skip("refused, as the first test has seen, or for the full tier")
    losses, norms, weights, heldout = expected(name)
    result = trained[name]
    steps = [record for record in result["records"] if "loss" in record]
    heldout_limit = 1e-2 if FEATURES[name].rounds else 1e-5  # which is cut differently
    if FEATURES[name].rounds and result["facts"]["axes"]:  # scales are of other parts of a batch
        assert [record["loss"] for record in steps] == pytest.approx(losses, rel=2e-2)
        return
    assert [record["loss"] for record in steps] == pytest.approx(losses, rel=1e-5)
    assert [record["grad_norm"] for record in steps] == pytest.approx(norms, rel=1e-4)
    assert result["metrics"]["eval_loss"] == pytest.approx(heldout, rel=heldout_limit)
    final = load_file(f"{result['folder']}/final.safetensors")
    held = [key for key in weights if FEATURES[name].adapter is None or "lora" in key]
    assert set(held) <= set(final)
    for key in held:
        torch.testing.assert_close(final[key], weights[key], rtol=0, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", spread(["QLoRA", "DoRA", "packing"], 1))
@pytest.mark.parametrize("kind", ["accelerate ddp", "accelerate fsdp2"])
def test_the_same_through_accelerate(kind: str, name: str, tmp_path: Path) -> None:
    cases = {name: case(FEATURES[name], ALL_STRATEGIES[kind])}
    results = run_ranks(train_all, RANKS, str(tmp_path), cases, limit=900)[0]
    test_the_numbers_of_a_plain_loop(name, results)


@pytest.mark.parametrize("name", [name for name in TRAINED if FEATURES[name].adapter])
def test_a_checkpoint_holds_the_adapter_s_state_alone(name: str, trained: Any) -> None:
    if name not in trained:
        pytest.skip("for the full tier")
    result = trained[name]
    (step,) = Path(result["folder"]).glob("checkpoints/step-*")
    size = sum(file.stat().st_size for file in step.iterdir())
    assert size <= 16 * result["facts"]["trained_parameters"] + 1_000_000
    assert all("lora" in key for key in load_file(f"{result['folder']}/final.safetensors"))
