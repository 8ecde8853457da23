"""The share of a model that experts hold: one tensor for all, which gets no low-rank update."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.contracts.stage import PlanView
from pipeline.errors import Problem
from stages.model.hf import HfModel
from stages.model.read import config_at_hand

if TYPE_CHECKING:
    from torch import nn

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
SKIPPED = "of the model's parameters are experts that are one tensor, which get no update"
HINT = "train_also: ['*.experts.*'] trains them as a whole"


def skipped_experts(plan: PlanView) -> Iterator[Problem]:
    """A warning where the recipe's model has experts, with their share as its config tells it."""
    model = plan.find(HfModel)
    share = None if model is None else declared_share(config_at_hand(model) or {})
    if share is not None:
        message = f"all-linear reaches no expert: about {share:.0%} {SKIPPED}"
        yield Problem(key="targets", message=message, hint=HINT, warning=True)


def declared_share(config: Mapping[str, Any]) -> float | None:
    """The experts' part of a model's parameters, by the sizes in its config; None without experts,
    and where a size is not said. Norms, routers and shared experts are left out."""
    count = next((config[key] for key in COUNTS if config.get(key)), 0)
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        heads = int(config["num_attention_heads"])
        keys = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or hidden // heads)
        dense = int(config.get("first_k_dense_replace") or 0)
        tables = int(config["vocab_size"]) * hidden
        experts = 3 * hidden * inner * int(count) * (layers - dense)
        mlps = 3 * hidden * int(config.get("intermediate_size") or 0) * dense
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    attention = 2 * hidden * head * (heads + keys) * layers
    rest = attention + mlps + tables * (1 if config.get("tie_word_embeddings") else 2)
    return experts / (experts + rest) if experts > 0 else None


def built_share(model: nn.Module, trained: Collection[str] = ()) -> float:
    """The part of a module's parameters that experts in one tensor are, without those `trained`."""
    sizes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    experts = sum(
        math.prod(shape)
        for name, shape in sizes.items()
        if _is_stack(name, shape) and name not in trained
    )
    return experts / sum(math.prod(shape) for shape in sizes.values())


def _is_stack(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and "expert" in name
