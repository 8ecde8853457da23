"""Random weights of a shape, in a folder as Hugging Face has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SHARD = 8 << 30
"""Bytes of a file, at most."""


def write_model(config: Mapping[str, Any], folder: Path, device: str) -> None:
    """Write the config, and bf16 weights drawn on the device: normal, 0.02 wide; norms are one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), "utf-8")
    words = Tokenizer(WordLevel({"<eos>": 0, "text": 1}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    tokenizer.save_pretrained(folder)  # a recipe with texts needs one
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    number = 0
    for name, parameter in model.named_parameters():
        part[name] = _values(parameter, generator, device)
        if sum(one.nbytes for one in part.values()) > SHARD:
            number = _flush(part, folder, number, index)
    _flush(part, folder, number, index)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}), "utf-8"
    )


def _values(parameter: torch.Tensor, generator: torch.Generator, device: str) -> torch.Tensor:
    values = torch.empty(parameter.shape, device=device, dtype=torch.bfloat16)
    if parameter.ndim < 2:
        return values.fill_(1.0).cpu()
    return values.normal_(0.0, 0.02, generator=generator).cpu()


def _flush(part: dict[str, torch.Tensor], folder: Path, number: int, index: dict[str, str]) -> int:
    if part:
        name = f"model-{number:05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, name))
        part.clear()
    return number + 1
