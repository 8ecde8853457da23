"""More of the table of `known.py`: models of families that are described as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _sized(
    kind: str, vocabulary: int, hidden: int, inner: int, blocks: int, heads: int, keys: int,
    **more: Any,
) -> Mapping[str, Any]:  # fmt: skip
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        **more,
    }


PHI3 = {
    "microsoft/Phi-3-mini-4k": _sized("phi3", 32064, 3072, 8192, 32, 32, 32, sliding_window=2047),
    "microsoft/Phi-3-medium-4k": _sized(
        "phi3", 32064, 5120, 17920, 40, 40, 10, sliding_window=2047
    ),
    "microsoft/phi-4": _sized("phi3", 100352, 5120, 17920, 40, 40, 10, sliding_window=None),
    "microsoft/Phi-4-mini": _sized(
        "phi3",
        200064,
        3072,
        8192,
        32,
        24,
        8,
        sliding_window=262144,
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
        pad_token_id=199999,
    ),
}
GEMMA2 = {
    "google/gemma-2-2b": _sized("gemma2", 256000, 2304, 9216, 26, 8, 4, head_dim=256),
    "google/gemma-2-9b": _sized("gemma2", 256000, 3584, 14336, 42, 16, 8, head_dim=256),
    "google/gemma-2-27b": _sized("gemma2", 256000, 4608, 36864, 46, 32, 16, head_dim=128),
}
GEMMA3 = {
    name: _sized("gemma3_text", 262144, *sizes, head_dim=256, sliding_window=512)
    for name, sizes in {
        "google/gemma-3-270m": (640, 2048, 18, 4, 1),
        "google/gemma-3-1b": (1152, 6912, 26, 4, 1),
    }.items()
}
OLMO2 = {
    "allenai/OLMo-2-0425-1B": _sized("olmo2", 100352, 2048, 8192, 16, 16, 16),
    "allenai/OLMo-2-1124-7B": _sized("olmo2", 100352, 4096, 11008, 32, 32, 32),
    "allenai/OLMo-2-1124-13B": _sized("olmo2", 100352, 5120, 13824, 40, 40, 40),
    "allenai/OLMo-2-0325-32B": _sized("olmo2", 100352, 5120, 27648, 64, 40, 8),
}
GRANITE = {
    f"ibm-granite/granite-3.1-{size}": _sized(
        "granite", 49155, *sizes, 32, 8, tie_word_embeddings=True
    )
    for size, sizes in {"2b": (2048, 8192, 40), "8b": (4096, 12800, 40)}.items()
}
GPT2 = {
    f"openai-community/{name}": {
        "model_type": "gpt2", "n_embd": width, "n_layer": blocks, "n_head": heads,
    }
    for name, (width, blocks, heads) in {
        "gpt2": (768, 12, 12),
        "gpt2-medium": (1024, 24, 16),
        "gpt2-large": (1280, 36, 20),
        "gpt2-xl": (1600, 48, 25),
    }.items()
}  # fmt: skip
GPT_NEOX = {
    f"EleutherAI/{name}": {
        "model_type": "gpt_neox", "vocab_size": vocabulary, "hidden_size": width,
        "intermediate_size": 4 * width, "num_hidden_layers": blocks, "num_attention_heads": heads,
    }
    for name, (vocabulary, width, blocks, heads) in {
        "pythia-70m": (50304, 512, 6, 8),
        "pythia-160m": (50304, 768, 12, 12),
        "pythia-410m": (50304, 1024, 24, 16),
        "pythia-1b": (50304, 2048, 16, 8),
        "pythia-1.4b": (50304, 2048, 24, 16),
        "pythia-2.8b": (50304, 2560, 32, 32),
        "pythia-6.9b": (50432, 4096, 32, 32),
        "pythia-12b": (50688, 5120, 36, 40),
        "gpt-neox-20b": (50432, 6144, 44, 64),
    }.items()
}  # fmt: skip
KNOWN: Mapping[str, Mapping[str, Any]] = {
    **PHI3,
    **GEMMA2,
    **GEMMA3,
    **OLMO2,
    **GRANITE,
    **GPT2,
    **GPT_NEOX,
}
"""Hub id without what says how it was tuned -> config."""
