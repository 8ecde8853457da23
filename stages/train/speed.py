"""The speed of a training, judged: its use of the accelerators, and ranks that hold up the others.

Model FLOPs utilisation is the model's arithmetic as a share of an accelerator's peak. Chowdhery et
al. 2022, PaLM, appendix B: a token costs 6 N + 12 L H Q T floating-point operations in forward and
backward, with N parameters of matrix products (an input embedding if it is tied to the output),
L blocks, H attention heads of size Q, and sequence length T. Utilisation is that times tokens per
second over the peak. Recomputation does not count. A frozen parameter costs 4 instead of 6.
Attention counts in full, although a causal mask makes half of it unnecessary.

The time of a step is the same on all ranks, since they wait for each other. So a rank is judged by
what it does without others: its wait for data, and the same arithmetic on every rank, timed between
steps.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline import Context, Engine, ModelSource
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


EVERY = 25
"""Steps between two comparisons."""
MARGIN = 1.5
"""A rank that takes this many times as long as the others is named."""
LEAST_SHARE = 0.1
"""Share of the step that it must cost."""
REPEATS = 5
ROWS = {"cpu": 384, "cuda": 2048}
"""Rows of the square matrices whose product is timed; 16 MiB on a GPU."""
PRODUCTS = {"cpu": 1, "cuda": 20}
"""Products in one timing, which is about a millisecond."""


class Figures(NamedTuple):
    """Seconds that one rank takes without the others."""

    step: float
    """Mean of a step."""
    data: float
    """Mean wait for data in a step."""
    arithmetic: float
    """Time of the same products of matrices on every rank."""


def stragglers(figures: Sequence[Figures]) -> Iterator[tuple[int, float, str]]:
    """Ranks that hold up the others, by the figures of all in rank order: each with the share of
    the step's time that it costs, and why."""
    step = statistics.fmean(one.step for one in figures)
    for rank, own in enumerate(figures):
        others = [one for number, one in enumerate(figures) if number != rank]
        if not others:
            return
        usual = statistics.median(one.data for one in others)
        share = (own.data - usual) / step
        if own.data > MARGIN * usual and share > LEAST_SHARE:
            why = f"it waits {own.data:.3g} s for data, the others {usual:.3g} s"
            yield rank, share, why
        usual = statistics.median(one.arithmetic for one in others)
        factor = own.arithmetic / usual
        if factor > MARGIN:
            why = f"it takes {factor:.1f} times as long for the same arithmetic"
            yield rank, 1 - 1 / factor, why


class StragglerWatch:
    """Compares the ranks every EVERY steps."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._steps, self._seconds, self._data = 0, 0.0, 0.0
        self._matrices: tuple[Tensor, Tensor] | None = None

    def look(self, step: int, *, seconds: float, data: float) -> bool:
        """Take note of a step that took `seconds`, `data` of them waiting for data on this rank;
        compare the ranks if it is time (collective), and return whether it was."""
        dist = self.ctx.dist
        if dist.world_size == 1:
            return False
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._data += data
        if self._steps < EVERY:
            return False
        own = Figures(self._seconds / self._steps, self._data / self._steps, self._arithmetic())
        self._steps, self._seconds, self._data = 0, 0.0, 0.0
        for rank, share, why in stragglers([Figures(*one) for one in dist.gather(own)]):
            message = "step %d: rank %d holds up the others for %.0f%% of a step: %s"
            self.ctx.log.warning(message, step, rank, 100 * share, why)
            record = {"straggler": rank, "share": round(share, 3), "why": why}
            self.ctx.metrics.write_training({"step": step, "time": time.time(), **record})
        return True

    def _arithmetic(self) -> float:
        """Shortest of a few timings: what else the machine does at a moment is not its speed, and
        the first may include the device's work on the step that is launched."""
        device = self.ctx.dist.device
        if self._matrices is None:
            rows = ROWS[device.type]
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
            factor = torch.full((rows, rows), 1 / rows, device=device, dtype=dtype)
            self._matrices = factor, torch.empty_like(factor)
        factor, product = self._matrices
        shortest = float("inf")
        for _ in range(REPEATS):
            began = time.perf_counter()
            for _ in range(PRODUCTS[device.type]):
                torch.mm(factor, factor, out=product)
            float(product[0, 0])  # waits for the device
            shortest = min(shortest, time.perf_counter() - began)
        return shortest
