"""More of anything never needs less, and more GPUs never need more of each."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pipeline.forecast.placement import BUFFERS, GATHERED, WHOLE_GRADIENTS
from pipeline.forecast.tape import ACTIVATIONS
from pipeline.forecast.tape import GRADIENTS as PASSING
from stages.train.story import LOGITS

from stages.wrap.ddp import Ddp
from stages.wrap.fsdp import Fsdp
from stages.wrap.zero.options import OptimizerOffload, ParameterOffload
from stages.wrap.zero.stage import Zero
from tests.support.forecasts import LLAMA, Told, declared
from tests.support.tier import examples

configs = st.builds(
    lambda hidden, inner, heads, groups, blocks, vocabulary, tied: {
        **LLAMA,
        "hidden_size": 64 * heads * hidden,
        "intermediate_size": 128 * inner,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // groups, 1),
        "num_hidden_layers": blocks,
        "vocab_size": 512 * vocabulary,
        "tie_word_embeddings": tied,
    },
    hidden=st.integers(1, 2),
    inner=st.integers(1, 24),
    heads=st.sampled_from([2, 4, 8]),
    groups=st.sampled_from([1, 2, 4]),
    blocks=st.integers(1, 6),
    vocabulary=st.integers(1, 64),
    tied=st.booleans(),
)
wraps = st.sampled_from(
    [
        Ddp(),
        Ddp(gradient_as_bucket_view=False),
        Fsdp(),
        Fsdp(sharding="shard_grad_op"),
        Fsdp(reduce_every_microbatch=False),
        Fsdp(cpu_offload=True),
        Zero(stage=1),
        Zero(stage=2, reduce_bucket_size=100_000),
        Zero(stage=3),
        Zero(stage=3, offload_optimizer=OptimizerOffload(), offload_param=ParameterOffload()),
    ]
)
settings_of = st.fixed_dictionaries(
    {
        "micro": st.integers(1, 3),
        "length": st.sampled_from([16, 128, 512]),
        "accumulation": st.integers(1, 3),
        "chunk": st.sampled_from([None, 64]),
        "compute": st.sampled_from(["bf16", "fp32"]),
        "kernel": st.sampled_from(["fused", "foreach", "single"]),
    }
)
cases = {"config": configs, "wrap": wraps, "how": settings_of, "again": st.booleans()}


def needed(config: dict[str, Any], wrap: Any, how: dict[str, Any], again: bool, ranks: int) -> int:
    told = Told(wrap, declared(config, again=again), ranks=ranks, **how)
    return max(peak.bytes for peak in told.peaks("device", "host").values())


@examples(60)
@given(**cases, ranks=st.sampled_from([1, 2, 4, 8]))
def test_more_ranks_never_need_more_of_each(
    config: dict[str, Any], wrap: Any, how: dict[str, Any], again: bool, ranks: int
) -> None:
    # One rank gathers nothing, and so needs no buffers.
    start = max(ranks, 2)
    less = needed(config, wrap, how, again, start * 2)
    assert less <= needed(config, wrap, how, again, start)


@examples(60)
@given(**cases, key=st.sampled_from(["micro", "length", "accumulation"]))
def test_larger_batches_never_need_less(
    config: dict[str, Any], wrap: Any, how: dict[str, Any], again: bool, key: str
) -> None:
    more = {**how, key: how[key] * 2}
    assert needed(config, wrap, more, again, 2) >= needed(config, wrap, how, again, 2)


@examples(60)
@given(**cases, key=st.sampled_from(["intermediate_size", "num_hidden_layers", "vocab_size"]))
def test_larger_models_never_need_less(
    config: dict[str, Any], wrap: Any, how: dict[str, Any], again: bool, key: str
) -> None:
    larger = {**config, key: config[key] * 2}
    assert needed(larger, wrap, how, again, 2) >= needed(config, wrap, how, again, 2)


@examples(40)
@given(config=configs, wrap=wraps, how=settings_of)
def test_nothing_is_left_behind(config: dict[str, Any], wrap: Any, how: dict[str, Any]) -> None:
    """After a step there is what there was before, and the optimizer's state."""
    told = Told(wrap, declared(config), ranks=2, **how)
    ledger = told.site.ledger
    kept = {**ledger.held("device"), **ledger.held("host")}
    assert all(size > 0 for size in kept.values())
    passing = {ACTIVATIONS, PASSING, LOGITS, GATHERED, WHOLE_GRADIENTS, BUFFERS}
    assert not passing & set(kept)
