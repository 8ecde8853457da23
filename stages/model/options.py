"""Nested blocks of model.hf's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Drop activations of transformer blocks in forward and compute them again in backward (Chen et
    al. 2016, Training Deep Nets with Sublinear Memory Cost)."""

    every: Annotated[int, Gt(0)] = 1
    """Every n-th block is computed again, from the first on; 1 means all."""

    keep: Literal["nothing", "attention", "matmuls"] = "nothing"
    """What is kept all the same, as it costs most to compute: results of attention, or of attention
    and all matrix products."""

    offload: bool = False
    """Keep the inputs of these blocks in host memory until backward needs them."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile each transformer block with torch.compile."""

    backend: str = "inductor"
    """Backend of torch.compile."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "default"
    )
    """How much time to spend on faster kernels."""

    dynamic: bool | None = None
    """Whether shapes change: null finds out, false compiles anew for each length, true for all
    lengths at once."""


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Multiply in 8 bits where that is faster: linear layers but the head, by torchao (Micikevicius
    et al. 2022, FP8 Formats for Deep Learning). Weights, gradients and everything else keep the
    precision slot's dtypes."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """What has a scale of its own: a tensor, which is fastest, or a row, which is more precise;
    `rowwise_with_gw_hp` computes gradients of weights in the compute dtype."""

    emulate: bool = False
    """Round to 8 bits but multiply in the compute dtype: slow, to try it without such a GPU."""
