"""The linear layers of a language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def linear_layers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of all but the head: torch's and its subclasses, and GPT-2's kind. What
    only looks like one, such as a router or experts that are one tensor, is none."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if is_linear(module) and module is not head:
            yield name, module


def is_linear(module: nn.Module) -> bool:
    """Whether it is such a layer."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
