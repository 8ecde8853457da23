"""Models of more than text, trained on text: the parts that text does not use are left out.

Only the language model, the embedding and the head are built into memory, within the architecture's
own class, whose names, config and files stay. What is left out has no memory, no gradients and no
optimizer state; an export takes it from the source's files.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from pipeline import StageError

WITHOUT_TEXT = ("MllamaCrossAttentionDecoderLayer",)
"""Classes of modules in a language model that are skipped where there are no images."""


class LeftOut(nn.Module):
    """In the place of a part that text does not use."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StageError(f"text passes through {self._name}, which is not part of a language model")


def leave_out_towers(model: Any) -> None:
    """Take from a model of more than text every parameter that text does not use. Raises StageError
    for one that does not say which part of it is its language model."""
    decoder = model.get_decoder()
    apart = decoder is not None and decoder is not model and decoder is not model.base_model
    if not apart or getattr(model.config, "is_encoder_decoder", False):
        raise StageError(
            f"{type(model).__name__} is a model of more than text, and transformers does not say "
            "which part of it is a language model",
            hint="train a language model",
        )
    parts = (decoder, model.get_input_embeddings(), model.get_output_embeddings())
    kept = {id(one) for part in parts if part is not None for one in part.parameters()}
    skipped = (one for one in model.modules() if type(one).__name__ in WITHOUT_TEXT)
    _leave_out(model, "", kept - {id(one) for layer in skipped for one in layer.parameters()})


def _leave_out(module: nn.Module, name: str, kept: set[int]) -> None:
    prefix = f"{name}." if name else ""
    for leaf, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in kept:
            module._parameters[leaf] = None
    for leaf, child in list(module.named_children()):
        inner = [id(parameter) for parameter in child.parameters()]
        if kept.isdisjoint(inner):
            if inner:
                module.add_module(leaf, LeftOut(prefix + leaf))
        elif not kept.issuperset(inner):
            _leave_out(child, prefix + leaf, kept)
