"""Fields of `adapter.lora`, and what an adapted model is to stages that export it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from stages.model.declared import DerivedSource

if TYPE_CHECKING:
    from torch import nn

    from stages.adapter.compat import Layer

QuantType = Literal["nf4", "fp4"]
"""The 16 values of 4 bits: quantiles of a normal distribution, or floating-point numbers."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Fields of an adapter slot; `Lora` says what they mean together."""

    rank: Annotated[int, Gt(0)] = 16
    """Rank of the updates."""
    alpha: Annotated[float, Gt(0)] = 32.0
    """Updates are scaled by alpha / rank."""
    scaling: Literal["standard", "rslora"] = "standard"
    """`rslora` scales by alpha / sqrt(rank) instead, which keeps large ranks learning
    (Kalajdzievski 2023)."""
    dora: bool = False
    """Train the length of each weight row apart from its direction (Liu et al. 2024, DoRA)."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of an update's inputs that is dropped in training."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get an update: ends of their names (`q_proj`, `mlp.up_proj`), or all but
    the head. A warning names those that get none."""
    target_parameters: tuple[str, ...] | None = None
    """Stacked weights of experts that get an update, one for each expert: ends of their names
    (`mlp.experts.down_proj`), as in peft. By default all of them if `targets` is all-linear, but
    those that `train_also` trains; none with `dora`, which peft does not have for them."""
    quantize: QuantType | None = None
    """Hold the weights of all linear layers but the head in 4 bits, by bitsandbytes (Dettmers et
    al. 2023, QLoRA). The trained, merged and exported model is the one with these weights."""
    train_also: tuple[str, ...] = ()
    """Patterns (`lm_head.*`, `*norm.weight`) of the model's own parameters that are trained
    in full, in addition to the updates."""
    start_from: str | None = None
    """Folder with an adapter saved by this program or by peft, to start from. It must have these
    settings, and should have been trained on weights in the same precision."""

    @property
    def misses_experts(self) -> bool:
        """Whether experts get no update."""
        if self.target_parameters is None:
            return self.dora or self.targets != "all-linear"
        return not self.target_parameters


class AdaptedModel(DerivedSource):
    """A model whose own weights are frozen, with an adapter that is trained."""

    stage: LoraSettings
    outline: nn.Module
    """The module with updates, on the meta device."""
    layers: Sequence[Layer]
    """Layers and stacked weights of experts that have an update."""
    trained: Sequence[str]
    """Names of the trained parameters, which are the adapter."""
