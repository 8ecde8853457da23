"""Architectures to measure with, by the names that options use; their weights are random."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936,
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}  # fmt: skip

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "1.5b": {
        **_QWEN, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2,
    },
    "0.5b": {
        **_QWEN, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "small": {
        **_QWEN, "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 2048,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
    },
    "tiny": {
        **_QWEN, "vocab_size": 1021, "hidden_size": 56, "intermediate_size": 148,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
"""Qwen2.5-1.5B and Qwen2.5-0.5B as in their config.json; smaller models of 47 and 0.2 million
parameters."""

Shape = tuple[int, ...]


def outline(config: Mapping[str, Any], dtype: Any = None) -> Any:
    """Return the module with parameters on the meta device in torch dtype `dtype`, its weights
    tied."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.tie_weights()
    for parameter in model.parameters() if dtype else ():
        parameter.data = parameter.data.to(dtype)
    return model


def parameters(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every parameter by name, tied ones once, in the order of the module."""
    return {name: tuple(one.shape) for name, one in outline(config).named_parameters()}


def split(tensors: Mapping[str, Shape], parts: int) -> list[list[str]]:
    """Split the names in order into at most `parts` groups of about equal size."""
    total, done = count(tensors), 0
    groups: list[list[str]] = [[] for _ in range(parts)]
    for name, shape in tensors.items():
        middle = done + math.prod(shape) // 2
        groups[min(middle * parts // total, parts - 1)].append(name)
        done += math.prod(shape)
    return [group for group in groups if group]


def count(tensors: Mapping[str, Shape]) -> int:
    """Return the number of elements of all parameters."""
    return sum(math.prod(shape) for shape in tensors.values())
