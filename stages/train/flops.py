"""Model FLOPs utilisation: the model's arithmetic as a share of an accelerator's peak.

Chowdhery et al. 2022, PaLM, appendix B: a token costs 6 N + 12 L H Q T floating-point operations in
forward and backward, with N parameters of matrix products (an input embedding if it is tied to the
output), L blocks, H attention heads of size Q, and sequence length T. Utilisation is that times
tokens per second over the peak. Recomputation does not count. A frozen parameter costs 4 instead of
6. Attention counts in full, although a causal mask makes half of it unnecessary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline import Engine, ModelSource
from pipeline.hardware import find_accelerator
from stages.model.declared import logical_numel, outline

NARROW = (["bf16"], ["fp16"])
"""Compute dtypes of an engine to which the peaks apply."""


@dataclass(frozen=True)
class Cost:
    """Floating-point operations of a token in forward and backward."""

    multiplied: float
    """Operations that do not depend on the length of the sequence: 6 N."""
    attention: float
    """Operations per token of sequence length: 12 L H Q."""
    peak: float
    """Operations per second of one device."""

    def utilisation(self, tokens: float, squares: float, device_seconds: float) -> float:
        """Share of the peak, 0 to 1, of samples with `tokens` tokens, whose squared lengths sum to
        `squares`, in `device_seconds` seconds times devices."""
        operations = self.multiplied * tokens + self.attention * squares
        return operations / (device_seconds * self.peak)


def known_peak(engine: Engine) -> float | None:
    """Operations per second of the engine's device; None in fp32, and for unknown GPUs."""
    if engine.device.type != "cuda" or engine.describe().get("compute") not in NARROW:
        return None
    device = find_accelerator(torch.cuda.get_device_name(engine.device))
    return None if device is None else device.flops


def known_cost(engine: Engine, source: ModelSource, peak: float | None = None) -> Cost | None:
    """Cost of a token of the source's model in an engine, whose device has this peak, by default
    the known one. None without a peak, and for mixtures of experts."""
    peak = peak or known_peak(engine)
    if peak is None:
        return None
    model = next((m for m in outline(source).modules() if isinstance(m, PreTrainedModel)), None)
    config: Any = None if model is None else model.config.get_text_config()
    if model is None or getattr(config, "num_experts_per_tok", None):
        return None
    try:
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        attention = 12.0 * config.num_hidden_layers * heads * size
    except AttributeError:
        return None
    state, known, inputs = engine.state(), logical_numel(model), model.get_input_embeddings()
    module = next((name for name, other in model.named_modules() if other is inputs), "")
    embedding = f"{module}.weight"
    tied = embedding in {*state.aliases, *state.aliases.values()}
    multiplied = 0.0
    for name in (*state.updates, *state.frozen):
        if name in state.shapes and (name != embedding or tied):
            elements = known.get(name) or math.prod(state.shapes[name])
            multiplied += (6.0 if name in state.updates else 4.0) * elements
    return Cost(multiplied, attention, peak)
