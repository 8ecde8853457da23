"""Linear layers whose weight is packed in 4 bits."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline import ModelSource, StageError, TensorReader
from stages.adapter.compat import bitsandbytes
from stages.adapter.nf4 import PackedReader, RoundedReader, packed_bytes, rounded, unpack
from stages.model.block_changes import linear_layers
from stages.model.declared import DerivedSource, outline

if TYPE_CHECKING:
    from stages.adapter.lora import QuantType


class PackedLinear(nn.Linear):
    """A linear layer with a frozen weight that is unpacked for each product, in the dtype of the
    input."""

    def __init__(self, like: nn.Linear, kind: QuantType) -> None:
        nn.Module.__init__(self)
        bitsandbytes()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.kind: QuantType = kind
        elements = like.in_features * like.out_features
        self.logical_numel = {"packed": elements}
        held = torch.empty(packed_bytes(elements), dtype=torch.uint8, device=like.weight.device)
        self.packed = nn.Parameter(held, requires_grad=False)
        self.bias = like.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight itself, shape (out_features, in_features), in the dtype in which its bytes are
        held, or fp32; nothing while its bytes are partitioned."""
        if not self.packed.numel():
            return self.packed
        dtype = self.packed.dtype if self.packed.is_floating_point() else torch.float32
        return unpack(self.packed, (self.out_features, self.in_features), self.kind, dtype)

    def forward(self, input: Tensor) -> Tensor:
        shape = (self.out_features, self.in_features)
        product: Tensor = _Product.apply(input, self.packed, shape, self.kind)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """x W^T, keeping the packed weight for backward instead of the unpacked one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int], kind: QuantType
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape, ctx.kind = shape, kind
        return F.linear(x, unpack(packed, shape, kind, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        return grad @ unpack(packed, ctx.shape, ctx.kind, grad.dtype), None, None, None


def quantizable(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that are quantized, by name: torch's own, without the head, whose errors
    show most."""
    for name, module in linear_layers(model):
        if type(module) is nn.Linear:
            yield name, module


def round_layers(model: nn.Module, kind: QuantType) -> None:
    """Give the quantizable layers the fp32 values that their weights have in 4 bits."""
    for _, module in quantizable(model):
        weight = module.weight
        weight.data = rounded(weight.data.reshape(-1), kind).view(weight.shape)


class RoundedSource(DerivedSource):
    """`base` in an ordinary module; the weights of linear layers but the head are the values that
    4 bits hold."""

    def __init__(self, base: ModelSource, kind: QuantType) -> None:
        super().__init__(base)
        self.kind: QuantType = kind

    @functools.cached_property
    def layers(self) -> Collection[str]:
        """Return the names of these layers. Raises StageError if the model has none."""
        found = frozenset(name for name, _ in quantizable(outline(self.base)))
        if not found:
            raise StageError(
                f"{self.name} has no linear layers to hold in 4 bits", hint="leave out quantize"
            )
        return found

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.base.fingerprint} {self.kind}".encode()).hexdigest()

    @property
    def inference_view(self) -> ModelSource:
        return self

    @property
    def export_view(self) -> ModelSource:
        return self

    def weights(self) -> TensorReader:
        return RoundedReader(self.base.weights(), self.layers, self.kind)


class PackedSource(RoundedSource):
    """`base` with these weights packed, each unpacked for its product."""

    @functools.cached_property
    def inference_view(self) -> ModelSource:
        return RoundedSource(self.base.inference_view, self.kind)

    @property
    def export_view(self) -> ModelSource:
        return RoundedSource(self.base.export_view, self.kind)

    @property
    def skeleton(self) -> ModelSource:
        return self.base.skeleton

    def build(self) -> nn.Module:
        model = self.base.build()
        for name, module in list(quantizable(model)):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, PackedLinear(module, self.kind))
        return model

    def weights(self) -> TensorReader:
        return PackedReader(self.base.weights(), self.layers, self.kind)
