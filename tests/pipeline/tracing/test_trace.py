"""What a trace says is what real tensors take, and what arithmetic says."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipeline.forecast.ledger import Peak
from pipeline.forecast.phases import BACKWARD, FORWARD, UPDATE
from pipeline.forecast.shapes import SampleShape
from pipeline.tracing import level
from pipeline.tracing.extrapolate import extrapolated, highest
from pipeline.tracing.run import Traced, run
from pipeline.tracing.structure import depths

from tests.support.tier import spread

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> Iterator[None]:
    """Its modules, which are no part of any package, can be imported."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def small() -> dict[str, Any]:
    """Name -> case of the program's second table."""
    from memories.cases import SMALL

    return {case.name: case for case in SMALL}


def peaks(traced: Traced) -> dict[str, Peak]:
    return highest((phase, peak) for (phase, _, _), peak in traced.trace.moments.items())


def samples(case: Any) -> SampleShape:
    return SampleShape(length=case.length, packed=case.packed)


def apart(told: Mapping[str, Peak], reference: Mapping[str, Peak]) -> float:
    """The largest relative difference of a phase's peak."""
    phases = (FORWARD, BACKWARD, UPDATE)
    return max(abs(told[phase].bytes / reference[phase].bytes - 1) for phase in phases)


@pytest.mark.parametrize(
    "name",
    ["DDP again, in chunks", "FSDP hybrid, late", "FSDP packed", "GPT-2", "Gemma 2", "LoRA, FSDP"],
)
def test_a_trace_is_what_real_tensors_take(small: dict[str, Any], name: str) -> None:
    from memories.compare import trace_and_tensors

    pair = trace_and_tensors(replace(small[name], length=64))
    assert abs(pair.error) < 0.005, f"{pair.told} instead of {pair.reference}"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("DDP", {"accumulation": 2}),
        ("DDP again, in chunks", {"ranks": 8}),
        ("FSDP hybrid, late", {"ranks": 64}),
        ("FSDP grad op", {"samples": 2}),
        ("FSDP packed", {"compute": "fp32"}),
        ("FSDP tied, in chunks", {"ranks": 16, "accumulation": 3}),
    ],
)
def test_arithmetic_is_what_a_trace_says(
    small: dict[str, Any], name: str, changes: dict[str, Any]
) -> None:
    from memories.compare import arithmetic_and_trace

    pair = arithmetic_and_trace(replace(small[name], **changes))
    assert abs(pair.error) < 0.02, f"{pair.told} instead of {pair.reference}"


LATE = {"reduce_every_microbatch": False}
AGAIN = {"activation_checkpointing": {}}
TIED = {"config": {"tie_word_embeddings": True}}
HALF = {"reduce": "bf16"}
WEIGHTS: dict[str, dict[str, Any]] = {
    "gradients are added at once": {"strategy": LATE, "accumulation": 3, **HALF, "model": AGAIN},
    "a block is gathered at the output": {
        "strategy": LATE, "accumulation": 2, **HALF, "chunk": 16, "length": 256,
    },
    "shards of replicas": {
        "strategy": {"sharding": "hybrid_shard", "shard_size": 2}, "ranks": 16, **HALF,
        "model": {"config": {"intermediate_size": 256}, **AGAIN},
    },
    "shards of one replica": {
        "strategy": {"sharding": "hybrid_shard", "shard_size": 4}, **HALF,
        "model": {"config": {"intermediate_size": 256}, **AGAIN},
    },
    "padded adapters": {
        "strategy": {"sharding": "shard_grad_op"}, "ranks": 16, "adapter": {"rank": 4},
    },
    "offloaded, tied": {"strategy": {"cpu_offload": True}, "model": {**TIED, **AGAIN}},
    "offloaded, 4 bits": {
        "strategy": {"cpu_offload": True}, "adapter": {"quantize": "nf4"}, "model": AGAIN,
    },
    "cast buckets": {"wrap": "ddp", **HALF, "model": AGAIN},
    "a tied weight's gradient waits": {
        "wrap": "ddp", "compute": "fp32", "model": {**TIED, **AGAIN},
    },
}  # fmt: skip
"""What decides where weights take more than activations."""


@pytest.mark.parametrize("name", spread(list(WEIGHTS), 3))
def test_arithmetic_of_few_tokens_is_what_a_trace_says(small: dict[str, Any], name: str) -> None:
    from memories.compare import arithmetic_and_trace

    changes = {"ranks": 4, "length": 32, **WEIGHTS[name]}
    sizes = {"vocab_size": 1000, "intermediate_size": 2048}
    model: dict[str, Any] = dict(small["FSDP"].model)
    for more in ({"config": sizes}, changes.pop("model", {})):
        model = {**model, **more, "config": {**model["config"], **more.get("config", {})}}
    pair = arithmetic_and_trace(replace(small["FSDP"], model=model, **changes))
    assert abs(pair.error) < 0.004, f"{pair.told} instead of {pair.reference}"


def test_a_window_has_one_mask_for_all_samples(small: dict[str, Any]) -> None:
    from memories.compare import arithmetic_and_trace

    narrow = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 300}
    kind = {"model_type": "mistral", "sliding_window": 64, "num_attention_heads": 4}
    config = {**small["DDP"].model["config"], **narrow, **kind, "num_key_value_heads": 2}
    case = replace(small["DDP"], model={"config": config, **AGAIN}, samples=4, chunk=64, ranks=4)
    pair = arithmetic_and_trace(case)
    assert abs(pair.error) < 0.003, f"{pair.told} instead of {pair.reference}"


@pytest.mark.parametrize("kernel", ["single", "foreach"])
def test_what_an_update_takes(small: dict[str, Any], kernel: str, tmp_path: Path) -> None:
    plan = small["FSDP"].plan(tmp_path)
    steps = [
        replace(step, stage=replace(step.stage, kernel=kernel))
        if step.slot == "optimizer"
        else step
        for step in plan.steps
    ]
    traced = level.traced_forecast(replace(plan, steps=tuple(steps)), small["FSDP"].site())
    assert traced.arithmetic is not None
    assert apart(traced.arithmetic.device, traced.forecast.device) < 0.02


@pytest.mark.parametrize("name", spread(["Gemma 2", "FSDP again, accumulated"], 1))
def test_two_depths_tell_of_all(small: dict[str, Any], name: str, tmp_path: Path) -> None:
    case = small[name]
    config = {**case.model["config"], "num_hidden_layers": 12}
    again = {"activation_checkpointing": {"every": 2}} if "again" in name else {}
    deep = replace(case, model={**case.model, "config": config, **again}, length=64)
    plan, site = deep.plan(tmp_path), deep.site()
    shallow, deeper = (run(plan, site, samples(deep), blocks=n).trace for n in (6, 8))
    whole = peaks(run(plan, site, samples(deep)))
    assert apart(highest(extrapolated(shallow, deeper, 12)), whole) < 0.001


@pytest.mark.parametrize("name", spread(["LoRA, FSDP", "FSDP", "FSDP again, accumulated"], 1))
def test_arithmetic_of_a_strategy_replays_a_model_that_ran_alone(
    small: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = small[name]
    plan, site = case.plan(tmp_path), case.site()
    traced = level.traced_forecast(plan, site)
    assert traced.how.startswith("model and strategy were traced")
    monkeypatch.setattr(level, "run", lambda *args, **more: run(*args, **more, alone=True))
    replayed = level.traced_forecast(plan, case.site())
    assert "what the strategy holds was computed" in replayed.how
    assert apart(replayed.forecast.device, traced.forecast.device) < 0.02


def test_packed_samples_have_a_mask(small: dict[str, Any], tmp_path: Path) -> None:
    packed = small["FSDP packed"]
    sizes = {}
    for case in (packed, replace(packed, packed=False)):
        sizes[case.packed] = peaks(run(case.plan(tmp_path), case.site(), samples(case)))
    more = sizes[True][FORWARD].bytes - sizes[False][FORWARD].bytes
    blocks, rows = 4, 256 * 256
    repeated = 2 * 256 * (256 - 128) * 2  # keys and values, once for each head
    assert more == pytest.approx(blocks * (rows * 2 + repeated) + rows, rel=0.1)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("a" * 80, (4, 5)),
        ("ab" * 20, (6, 8)),
        ("d" + "a" * 39, (5, 6)),
        ("aaab" * 6, (12, 16)),
        ("a" * 4, None),
        ("abcdefgh", None),
    ],
)
def test_depths_are_whole_periods_apart(kinds: str, expected: tuple[int, int] | None) -> None:
    assert depths(kinds) == expected


@pytest.mark.parametrize(
    ("kinds", "reach", "expected"),
    [("a" * 80, 3, (8, 9)), ("ab" * 20, 2, (8, 10)), ("a" * 8, 3, None)],
)
def test_depths_have_room_for_what_is_gathered_ahead(
    kinds: str, reach: int, expected: tuple[int, int] | None
) -> None:
    assert depths(kinds, reach) == expected


@pytest.mark.parametrize("ahead", spread([{"forward_prefetch": 3}, {"backward_prefetch": 3}], 1))
def test_units_gathered_ahead_are_traced_from_two_depths(
    small: dict[str, Any], ahead: dict[str, Any], tmp_path: Path
) -> None:
    case = small["FSDP"]
    model = {"config": {**case.model["config"], "num_hidden_layers": 12}}
    case = replace(case, model=model, strategy=ahead, compute="fp32", length=64)
    traced = level.traced_forecast(case.plan(tmp_path), case.site())
    assert "with 8 and 9 of 12 blocks" in traced.how
    assert traced.arithmetic is not None
    assert apart(traced.arithmetic.device, traced.forecast.device) < 0.002
