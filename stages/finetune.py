"""The recipe that `pipe advise` starts from: fine-tuning of a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stages.model.hf import HfModel
from stages.model.read import config_at_hand
from stages.model.source_text_compat import suited_attention

if TYPE_CHECKING:
    from pipeline.planning import AdviceRequest

BATCH = 64
"""Samples of a step, if the request does not say."""
TOKENS = 8192
"""Tokens of a forward pass on one GPU, if the request does not say: enough to keep it busy."""


def finetune(request: AdviceRequest) -> Mapping[str, Mapping[str, Any]]:
    """Slots of the recipe, with an empty one for the strategy."""
    batch = request.global_batch or max(BATCH, request.ranks)
    most = request.micro_batch or (max(TOKENS // request.sequence, 1) if request.on_gpus else 1)
    low_rank = {"adapter": {"use": "adapter.lora", "rank": 16, "alpha": 32}}
    rates = {"lr": 1e-4, "weight_decay": 0.0} if request.lora else {"lr": 1e-5, "weight_decay": 0.1}
    return {
        "model": {"use": "model.hf", **_attention(request), **request.model},
        **(low_rank if request.lora else {}),
        "precision": {"use": "precision.policy", "compute": request.compute},
        "data": {
            "use": "data.chat",
            "heldout_fraction": 0.02,
            "files": str(request.data.absolute()),
            "sequence_length": request.sequence,
        },
        "optimizer": {"use": "optimizer.adamw", "warmup_ratio": 0.03, **rates},
        "wrap": {},
        "checkpoint": {"use": "checkpoint.sharded", "every": 200, "keep": 2},
        "train": {
            "use": "train.causal_lm",
            "epochs": 1,
            "global_batch_size": batch,
            "micro_batch_size": min(most, -(-batch // request.ranks)),
        },
        "consolidate": {"use": "consolidate.stream"},
        "export": {"use": "export.safetensors", "dtype": "bf16"},
    }


def _attention(request: AdviceRequest) -> Mapping[str, str]:
    """The attention that the architecture has, where it is not the default."""
    config = config_at_hand(HfModel(**request.model)) or {}
    device = "cuda" if request.on_gpus else "cpu"
    best = suited_attention(str(config.get("model_type")), device)
    return {} if best == HfModel.attention else {"attention": best}
