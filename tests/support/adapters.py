"""Adapters of saved tiny models, trained or saved by peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages.adapter.compat import quiet
from stages.adapter.lora import Lora
from stages.adapter.nf4 import quantizable, rounded
from stages.adapter.peft_files import peft_config
from stages.model.hf import HfModel
from tests.support.models import context
from tests.support.moe import attention_of
from tests.support.weights import MemoryWeights


def base_of(config: dict[str, Any], folder: Path) -> Path:
    """Save a model with random weights."""
    settings = dict(config)
    torch.manual_seed(3)
    made = AutoConfig.for_model(settings.pop("model_type"), **settings)
    AutoModelForCausalLM.from_config(made).save_pretrained(folder / "base")
    return folder / "base"


def adapted(folder: Path, config: dict[str, Any], **fields: Any) -> Any:
    """Return the source of a saved model with an adapter."""
    attention = attention_of(config)
    base = HfModel(path=str(base_of(config, folder)), attention=attention).run(context(folder))
    return Lora(**fields).run(context(folder), base)


def trained(source: Any) -> MemoryWeights:
    """Return adapter weights as after a training, different from the initial ones."""
    reader, generator = source.weights(), torch.Generator().manual_seed(5)
    values = {name: reader.read(name).float() for name in source.trained}
    return MemoryWeights(
        {
            name: value + 0.1 * torch.randn(value.shape, generator=generator)
            for name, value in values.items()
        }
    )


def module_with(source: Any, weights: MemoryWeights) -> torch.nn.Module:
    """Return the module in memory with the source's values, and the trained ones over them."""
    module, reader = source.build(), source.weights()
    values = {name: reader.read(name) for name in reader.names()} | weights.tensors
    module.load_state_dict(values, strict=False)
    source.tie(module)
    return module.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([[1, 5, 9, 2, 30]])).logits
    return found


def saved_by_peft(base: Path, source: Any, more: dict[str, Any]) -> tuple[Path, Any]:
    """Return a folder with an adapter that peft made, changed and saved, and peft's model."""
    config = peft_config(source.stage)
    for key, value in more.items():
        setattr(config, key, value)
    plain = AutoModelForCausalLM.from_pretrained(base)
    if source.stage.quantize is not None:
        for _, module in quantizable(plain):
            values = rounded(module.weight.data.reshape(-1), source.stage.quantize)
            module.weight.data = values.view(module.weight.shape)
    with quiet():
        model = peft.get_peft_model(plain, config)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    with quiet():
        model.save_pretrained(base.parent / "peft")
    return base.parent / "peft", model.eval()
