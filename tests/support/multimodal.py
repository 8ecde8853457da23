"""Tiny models of text and images, saved with all of their parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline.contracts.stage import Context
from stages.model.hf import HfModel
from stages.model.source import HfSource, open_source

TEXT: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SIGHT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
QWEN_SIGHT: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 4,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 16}, "vision_config": SIGHT,
        "mm_tokens_per_image": 4, "image_token_index": 130, "boi_token_index": 128,
        "eoi_token_index": 129,
    },
    "qwen3_5": {
        "text_config": {
            **TEXT, "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True},
        },
        "vision_config": {**QWEN_SIGHT, "num_position_embeddings": 16},
        "image_token_id": 130, "video_token_id": 129, "vision_start_token_id": 127,
        "vision_end_token_id": 128,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": MROPE},
        "vision_config": {**QWEN_SIGHT, "fullatt_block_indexes": [0], "window_size": 8},
        "image_token_id": 130, "video_token_id": 129, "vision_start_token_id": 127,
        "vision_end_token_id": 128,
    },
    "mllama": {
        "text_config": {
            **TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_global_layers": 1, "attention_heads": 2, "image_size": 8, "patch_size": 4,
            "max_num_tiles": 1, "vision_output_dim": 32, "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1]],
        },
        "image_token_index": 130,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**SIGHT, "model_type": "clip_vision_model"}, "image_token_index": 130,
    },
}  # fmt: skip


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save a tiny model of a type; return it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    model = AutoModelForImageTextToText.from_config(config).to(dtype)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "mine"}\n')
    return model.eval()


class WholeSource(HfSource):
    """A model of text and images with its towers, as a source of another package may declare it."""

    def build(self) -> Any:
        model = self._built()
        for name in self.frozen_base:
            model.get_parameter(name).requires_grad_(False)
        return model


def whole_source(ctx: Context, **fields: Any) -> WholeSource:
    """Return the source of a saved model with all of its parts."""
    stage = HfModel(**fields)
    text = open_source(stage, ctx)
    return WholeSource(stage, text.config, text._files, text._files, ctx)
