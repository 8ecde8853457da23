"""Architectures of well-known models, by their config.json on the hub: so that arithmetic about
them needs no network and no accepted licence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stages.model.known_families import KNOWN


class _Known(NamedTuple):
    """In the order of the table below."""

    kind: str
    vocabulary: int
    hidden: int
    inner: int
    blocks: int
    heads: int
    keys: int
    tied: bool = False
    head: int | None = None
    window: int | None = None


_TABLE: Mapping[str, _Known] = {
    "huggyllama/llama-7b": _Known("llama", 32000, 4096, 11008, 32, 32, 32),
    "huggyllama/llama-13b": _Known("llama", 32000, 5120, 13824, 40, 40, 40),
    "huggyllama/llama-30b": _Known("llama", 32000, 6656, 17920, 60, 52, 52),
    "huggyllama/llama-65b": _Known("llama", 32000, 8192, 22016, 80, 64, 64),
    "meta-llama/Llama-2-7b-hf": _Known("llama", 32000, 4096, 11008, 32, 32, 32),
    "meta-llama/Llama-2-13b-hf": _Known("llama", 32000, 5120, 13824, 40, 40, 40),
    "meta-llama/Llama-2-70b-hf": _Known("llama", 32000, 8192, 28672, 80, 64, 8),
    "meta-llama/Llama-3.1-8B": _Known("llama", 128256, 4096, 14336, 32, 32, 8),
    "meta-llama/Llama-3.1-70B": _Known("llama", 128256, 8192, 28672, 80, 64, 8),
    "meta-llama/Llama-3.1-405B": _Known("llama", 128256, 16384, 53248, 126, 128, 8),
    "meta-llama/Llama-3.2-1B": _Known("llama", 128256, 2048, 8192, 16, 32, 8, True, 64),
    "meta-llama/Llama-3.2-3B": _Known("llama", 128256, 3072, 8192, 28, 24, 8, True, 128),
    "meta-llama/Llama-3.3-70B": _Known("llama", 128256, 8192, 28672, 80, 64, 8),
    "mistralai/Mistral-7B-v0.1": _Known("mistral", 32000, 4096, 14336, 32, 32, 8, window=4096),
    "mistralai/Mistral-7B-v0.3": _Known("mistral", 32768, 4096, 14336, 32, 32, 8),
    "Qwen/Qwen2.5-0.5B": _Known("qwen2", 151936, 896, 4864, 24, 14, 2, True),
    "Qwen/Qwen2.5-1.5B": _Known("qwen2", 151936, 1536, 8960, 28, 12, 2, True),
    "Qwen/Qwen2.5-3B": _Known("qwen2", 151936, 2048, 11008, 36, 16, 2, True),
    "Qwen/Qwen2.5-7B": _Known("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-14B": _Known("qwen2", 152064, 5120, 13824, 48, 40, 8),
    "Qwen/Qwen2.5-32B": _Known("qwen2", 152064, 5120, 27648, 64, 40, 8),
    "Qwen/Qwen2.5-72B": _Known("qwen2", 152064, 8192, 29568, 80, 64, 8),
    "Qwen/Qwen3-0.6B": _Known("qwen3", 151936, 1024, 3072, 28, 16, 8, True, 128),
    "Qwen/Qwen3-1.7B": _Known("qwen3", 151936, 2048, 6144, 28, 16, 8, True, 128),
    "Qwen/Qwen3-4B": _Known("qwen3", 151936, 2560, 9728, 36, 32, 8, True, 128),
    "Qwen/Qwen3-8B": _Known("qwen3", 151936, 4096, 12288, 36, 32, 8, False, 128),
    "Qwen/Qwen3-14B": _Known("qwen3", 151936, 5120, 17408, 40, 40, 8, False, 128),
    "Qwen/Qwen3-32B": _Known("qwen3", 151936, 5120, 25600, 64, 64, 8, False, 128),
    "HuggingFaceTB/SmolLM2-135M": _Known("llama", 49152, 576, 1536, 30, 9, 3, True),
    "HuggingFaceTB/SmolLM2-360M": _Known("llama", 49152, 960, 2560, 32, 15, 5, True),
    "HuggingFaceTB/SmolLM2-1.7B": _Known("llama", 49152, 2048, 8192, 24, 32, 32, True),
}
"""Hub id without what says how it was tuned."""

_TUNED = ("-Instruct", "-instruct", "-chat-hf", "-Base", "-base", "-Chat", "-it", "-pt")


def known_config(repo: str) -> dict[str, Any] | None:
    """The config of a hub model; None for one that is not in the table."""
    base = repo
    for ending in _TUNED:
        base = base.removesuffix(ending)
    if base in KNOWN:
        return dict(KNOWN[base])
    found = _TABLE.get(base) or _TABLE.get(f"{base}-hf")
    if found is None:
        return None
    return {
        "model_type": found.kind,
        "vocab_size": found.vocabulary,
        "hidden_size": found.hidden,
        "intermediate_size": found.inner,
        "num_hidden_layers": found.blocks,
        "num_attention_heads": found.heads,
        "num_key_value_heads": found.keys,
        "tie_word_embeddings": found.tied,
        **({} if found.head is None else {"head_dim": found.head}),
        **({"sliding_window": found.window} if found.kind == "mistral" else {}),
    }
