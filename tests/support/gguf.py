"""Write a tiny Llama, or any tensors, as a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers.": "blk.",
}


def write_tensors(file: Path, tensors: Mapping[str, tuple[torch.Tensor, Kind]]) -> None:
    """Write fp32 tensors, each quantized to its given type; no config."""
    writer = gguf.GGUFWriter(file, "llama")
    for name, (tensor, kind) in tensors.items():
        _add(writer, name, tensor, kind)
    finish(writer)


def write_llama(file: Path, model: Any, matrices: Kind = Kind.F32) -> None:
    """Write config and weights of a LlamaForCausalLM, no tokenizer; vectors are in fp32."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in model.state_dict().items():
        if ".q_proj." in name:
            tensor = _interleaved(tensor, config.num_attention_heads)
        if ".k_proj." in name:
            tensor = _interleaved(tensor, config.num_key_value_heads)
        _add(writer, _renamed(name), tensor, matrices if tensor.ndim > 1 else Kind.F32)
    finish(writer)


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: Kind) -> None:
    stored = gguf.quantize(np.require(tensor.numpy(), requirements=["C"]), kind)
    writer.add_tensor(name, stored, raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Interleave the two halves of each rotary head, as llama.cpp's convert_hf_to_gguf does."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
