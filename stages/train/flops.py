"""Model FLOPs utilisation: how much of an accelerator's peak the arithmetic of the model is.

Chowdhery et al. 2022, PaLM, appendix B: a token costs 6 N + 12 L H Q T floating-point operations in
forward and backward, with N parameters, L blocks, H attention heads of size Q, and sequence length
T. Utilisation is that times tokens per second over the peak. What is computed twice, such as
activations under checkpointing, does not count.

N are the parameters that are multiplied by, so not the input embedding, unless it is the output
matrix too. A parameter that is not trained costs 4 instead of 6, since no gradient of it is made.
Attention over a sample counts in full, also where a mask makes half of it unnecessary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.contracts.engine import Engine
from pipeline.hardware.gpus import find_accelerator
from stages.model.declared import logical_numel

NARROW = (["bf16"], ["fp16"])
"""What an engine says of its compute dtype where the peaks apply."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a token costs."""

    multiplied: float
    """Operations that do not depend on the length of the sequence: 6 N."""
    attention: float
    """Operations per token of sequence length: 12 L H Q."""

    def of(self, tokens: float, squares: float) -> float:
        """Operations of samples with so many tokens, the squares of whose lengths sum to
        `squares`."""
        return self.multiplied * tokens + self.attention * squares


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """A model on one kind of accelerator."""

    cost: Cost
    peak: float
    """Operations a second of one device."""

    def share(self, tokens: float, squares: float, device_seconds: float) -> float:
        """Of the peak, from 0 to 1."""
        return self.cost.of(tokens, squares) / (device_seconds * self.peak)


def utilisation(engine: Engine) -> Utilisation | None:
    """Of the engine's model on its device; None where either's numbers are not known: without a
    GPU, on an unknown one, in fp32, for a model whose tokens do not go through all parameters."""
    if engine.device.type != "cuda" or engine.describe().get("compute") not in NARROW:
        return None
    peak = known_peak(torch.cuda.get_device_name(engine.device))
    cost = known_cost(engine)
    return None if peak is None or cost is None else Utilisation(cost=cost, peak=peak)


def known_peak(device_name: str) -> float | None:
    """Peak of the device of that name; None for one that is not known."""
    device = find_accelerator(device_name)
    return None if device is None else device.flops


def known_cost(engine: Engine) -> Cost | None:
    """Cost of a token; None for a mixture of experts, and for a model without the usual config."""
    model = next((m for m in engine.model.modules() if isinstance(m, PreTrainedModel)), None)
    if model is None:
        return None
    config = model.config.get_text_config()
    if getattr(config, "num_experts_per_tok", None):
        return None
    try:
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        attention = 12.0 * config.num_hidden_layers * heads * size
    except AttributeError:
        return None
    return Cost(multiplied=_multiplied(engine, model), attention=attention)


def _multiplied(engine: Engine, model: Any) -> float:
    """6 for each trained parameter that a token is multiplied by, 4 for each other."""
    state = engine.state()
    embedding = _input_embedding(model)
    aliases = {*state.aliases, *state.aliases.values()}
    known = logical_numel(model)
    total = 0.0
    for name in (*state.updates, *state.frozen):
        shared = embedding in aliases
        if name in state.shapes and (name != embedding or shared):
            elements = known.get(name) or math.prod(state.shapes[name])
            total += (6.0 if name in state.updates else 4.0) * elements
    return total


def _input_embedding(model: Any) -> str:
    """Name of its weight."""
    module = model.get_input_embeddings()
    name = next((name for name, other in model.named_modules() if other is module), "")
    return f"{name}.weight"
