"""Whether two ways of loading end with the same numbers: a digest of some whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def chosen(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The tensors of the layer in the middle."""
    layer = f"model.layers.{config['num_hidden_layers'] // 2}."
    return sorted(name for name in names if name.startswith(layer))


def of_module(
    module: Any, config: Mapping[str, Any], whole: Callable[[Any], Tensor] = lambda one: one
) -> str:
    """`whole` makes a full tensor of a parameter (collective)."""
    parameters = dict(module.named_parameters())
    return _digest((name, whole(parameters[name])) for name in chosen(config, parameters))


def of_partitioned(module: Any, config: Mapping[str, Any]) -> str:
    """The same of a module whose parameters ZeRO has partitioned (collective)."""
    import deepspeed

    parameters = dict(module.named_parameters())
    wanted = [parameters[name] for name in chosen(config, parameters)]
    with deepspeed.zero.GatheredParameters(wanted):
        return of_module(module, config)


def of_files(files: Iterable[Path], config: Mapping[str, Any], dtype: str) -> str:
    """What all must come to."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            for name in chosen(config, opened.keys()):
                tensors[name] = opened.get_tensor(name).to(DTYPES[dtype])
    return _digest(sorted(tensors.items()))


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = xxh3_64()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
