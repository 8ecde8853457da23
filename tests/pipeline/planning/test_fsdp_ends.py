"""Plans of wrap.fsdp beside traces, where most weights are those of the embedding and the head."""

from __future__ import annotations

from typing import Any

import pytest
from memories.cases import GRADIENTS_ONLY, HYBRID, LATE, Case, llama, own
from memories.compare import profile_and_trace

from tests.support.tier import spread

WIDE = llama(vocab_size=32000)
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "in chunks": {"chunk": 64, "length": 256},
    "grad op": {"strategy": GRADIENTS_ONLY},
    "hybrid": {"strategy": HYBRID | {"shard_size": 2}},
    "once a step": {"strategy": LATE, "accumulation": 3},
    "accumulated": {"accumulation": 3},
    "ahead": {"strategy": {"forward_prefetch": 1, "backward_prefetch": 2}},
    "offload": {"strategy": {"cpu_offload": True}},
    "named units": {"strategy": {"units": ["LlamaDecoderLayer"]}},
    "no shards": {"strategy": {"sharding": "no_shard"}},
    "narrow": {"reduce": "bf16"},
    "LoRA": {"adapter": {"rank": 8}},
    "tied": {"model": own(**WIDE | {"tie_word_embeddings": True})},
    "alone, accumulated": {"ranks": 1, "accumulation": 2},
}


@pytest.mark.parametrize("name", spread([*CASES], 4))
def test_the_ends_take_what_a_trace_takes(name: str) -> None:
    settings = {"model": own(**WIDE), "ranks": 4, "length": 64} | CASES[name]
    pair = profile_and_trace(Case(name=name, **settings))
    assert abs(pair.error) < 0.05, f"{pair.told} instead of {pair.reference}"
