"""Tiny architectures for tests: odd sizes, random weights, no files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from pipeline.contracts.metrics import Metrics
from pipeline.contracts.model import ModelSource, TensorReader
from pipeline.contracts.stage import Context
from pipeline.distributed.process_group import DistContext
from stages.model.hf import HfModel


def tiny_llama_config(**overrides: Any) -> dict[str, Any]:
    """Return a two-block Llama's config with sizes that no world size divides; `overrides` replace
    its keys."""
    return {
        "model_type": "llama",
        "vocab_size": 131,
        "hidden_size": 36,
        "intermediate_size": 53,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    } | overrides


def _gpt2() -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": 131,
        "n_embd": 30,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": tiny_llama_config(),
    "llama_tied": tiny_llama_config(tie_word_embeddings=True),
    "gpt2": _gpt2(),
    "qwen2": tiny_llama_config(model_type="qwen2"),
    "qwen3": tiny_llama_config(model_type="qwen3"),
    "mistral": tiny_llama_config(model_type="mistral"),
    "gemma": tiny_llama_config(model_type="gemma", tie_word_embeddings=True),
    "gemma2": tiny_llama_config(model_type="gemma2", tie_word_embeddings=True),
    "gemma3": tiny_llama_config(model_type="gemma3_text", tie_word_embeddings=True),
    "phi": tiny_llama_config(model_type="phi", num_key_value_heads=6, hidden_size=48, head_dim=8),
    "phi3": tiny_llama_config(model_type="phi3", original_max_position_embeddings=64),
    "mixtral": tiny_llama_config(
        model_type="mixtral", num_local_experts=3, num_experts_per_tok=2, intermediate_size=20
    ),
}
"""Config of one tiny model for each family, by the name in tests."""


def context(run_dir: Path, *, seed: int = 0) -> Context:
    """Return the run context of a single CPU process."""
    return Context(
        run_dir=run_dir,
        seed=seed,
        dist=DistContext(device=torch.device("cpu")),
        log=logging.getLogger("test"),
        metrics=Metrics(None),
    )


def random_source(config: dict[str, Any], run_dir: Path, *, seed: int = 0) -> ModelSource:
    """Return a source of `config` with random weights."""
    # it has no other implementation on CPU
    attention = "eager" if config["model_type"] == "gemma2" else "sdpa"
    return HfModel(config=config, attention=attention).run(context(run_dir, seed=seed))


def filled(source: ModelSource, reader: TensorReader | None = None) -> Any:
    """Return the source's module in memory with its weights (or those of `reader`), in eval
    mode."""
    with init_empty_weights(include_buffers=False):
        model = source.build()
    reader = reader or source.weights()
    state = {name: reader.read(name) for name in reader.names()}
    model.load_state_dict(state, strict=False, assign=True)
    source.tie(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model.eval()


def token_ids(count: int = 11) -> torch.Tensor:
    """Return fixed token ids, shape (1, count)."""
    return (torch.arange(count)[None] * 7 + 3) % 131


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(token_ids()).logits
    return result


def volatile_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the buffers that no checkpoint stores."""
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in stored:
            yield name, buffer


def save_tokenizer(folder: Path) -> None:
    """Save a word-level tokenizer of six words with a chat template: a is 3, b is 4."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "a", "b", "c"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(folder)
