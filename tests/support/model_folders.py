"""Folders of tiny models: saved, changed, opened and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import StageError
from pipeline.testing import plan_view
from stages.model.hf import HfModel
from tests.support.models import FAMILIES, context, filled, random_source

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def saved(
    folder: Path,
    config: dict[str, Any] | str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """Save a model with random weights through transformers; return the model."""
    config = FAMILIES[config] if isinstance(config, str) else config
    model = filled(random_source(config, folder, seed=seed)).to(dtype)
    model.save_pretrained(folder, **options)
    return model


def opened(path: Path | str, *, seed: int = 0, **fields: Any) -> Any:
    return HfModel(path=str(path), **fields).run(context(Path("run"), seed=seed))


def refused(folder: Path, **fields: Any) -> str:
    """Return the refusal to load a folder's weights."""
    with pytest.raises(StageError) as caught:
        opened(folder, **fields).weights()
    return str(caught.value)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite model.safetensors after `change` has changed its tensors."""
    tensors = tensors_of(folder)
    change(tensors)
    whole = {name: one.contiguous() for name, one in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def configured(folder: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: one for key, one in config.items() if one is not None}))


def found(**fields: Any) -> list[str]:
    """Return the mistakes of a model slot, without warnings, as `key: message (hint)`."""
    model = HfModel(**fields)
    problems = model.check(plan_view({"model": model}))
    return [str(one) for one in problems if not one.warning]
