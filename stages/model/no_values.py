"""Modules whose parameters are never made with values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class NoValues(TorchFunctionMode):
    """Make tensors without values on the meta device: accelerate's `init_empty_weights` moves
    parameters there only once they are made, and one of them may be larger than this machine's
    memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None and given.get("out") is None:
            given["device"] = torch.device("meta")
        return func(*args, **given)


def beside_parameters(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of a model, and tensors that its modules have as plain attributes."""
    yield from model.buffers()
    for module in model.modules():
        yield from (each for each in vars(module).values() if isinstance(each, Tensor))
