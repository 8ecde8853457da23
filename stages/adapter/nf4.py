"""Weights in 4 bits (NF4 or FP4): packed in linear layers, and as values."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline import ModelSource, StageError, TensorReader, TensorSpec
from pipeline.checkpoint import CHUNK
from stages.adapter.compat import bitsandbytes
from stages.adapter.settings import QuantType
from stages.model.block_changes import linear_layers
from stages.model.declared import DerivedSource, of_base, outline
from stages.weights.views import ComputedReader

BLOCK = 64
"""Elements that share a scale: the paper's block size, and bitsandbytes' default."""
SCALE = 4
"""Bytes of a scale, in fp32."""
STEP = CHUNK // 4 // torch.float32.itemsize // BLOCK * BLOCK
"""Elements that are quantized at a time: whole blocks, which are copied."""


def code_bytes(elements: int) -> int:
    """Return the bytes of the codes, rounded up to where a scale can begin."""
    return math.ceil(elements / (2 * SCALE)) * SCALE


def packed_bytes(elements: int) -> int:
    """Return the bytes of a packed weight: 4.5 bits an element, rounded up."""
    return code_bytes(elements) + math.ceil(elements / BLOCK) * SCALE


def codes(values: Tensor, kind: QuantType) -> Tensor:
    """Return the codes of flat fp32 values that begin with a block; uint8, two in each."""
    quantized: Tensor = bitsandbytes().functional.quantize_4bit(
        values, blocksize=BLOCK, quant_type=kind, compress_statistics=False
    )[0]
    return quantized.view(-1)


def scales(values: Tensor) -> Tensor:
    """Return the scales of the blocks of flat fp32 values that begin with a block; fp32."""
    whole = values.numel() // BLOCK * BLOCK
    return torch.cat([
        torch.linalg.vector_norm(blocks, torch.inf, dim=1)
        for blocks in (values[:whole].view(-1, BLOCK), values[whole:].view(1, -1))
        if blocks.numel()
    ])  # fmt: skip


def dequantize(
    codes: Tensor, scales: Tensor, elements: int, kind: QuantType, dtype: torch.dtype
) -> Tensor:
    """Return the values of codes and scales, flat. Needs bitsandbytes to be imported."""
    # Flat, as bitsandbytes 0.50 on CPUs takes the scales of rows wrongly that are no whole blocks.
    made: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        codes, scales, BLOCK, kind, [elements], dtype
    )
    return made.view(-1)


def rounded(values: Tensor, kind: QuantType) -> Tensor:
    """Return flat fp32 values that begin with a block, quantized and dequantized."""
    return dequantize(codes(values, kind), scales(values), values.numel(), kind, torch.float32)


def unpack(packed: Tensor, shape: Sequence[int], kind: QuantType, dtype: torch.dtype) -> Tensor:
    """Return the weight that is packed in a flat contiguous tensor, whatever dtype its bytes are
    held in. Needs bitsandbytes to be imported."""
    elements = math.prod(shape)
    held, border = packed.view(torch.uint8), code_bytes(elements)
    # Copied, as what a strategy gathers need not begin where fp32 may.
    factors = held[border : packed_bytes(elements)].clone().view(torch.float32)
    return dequantize(held[: math.ceil(elements / 2)], factors, elements, kind, dtype).view(shape)


def _blocks(base: TensorReader, weight: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """The whole blocks of fp32 values that hold elements [start, stop), with their first."""
    end = min(math.ceil(stop / BLOCK) * BLOCK, base.spec(weight).numel)
    for first in range(start // BLOCK * BLOCK, end, STEP):
        values = torch.empty(min(STEP, end - first), dtype=torch.float32)
        base.read_into(weight, first, values)
        yield first, values


def packed_reader(base: TensorReader, layers: Collection[str], kind: QuantType) -> ComputedReader:
    """Return `base` with the weights of `layers` as bytes: `<layer>.packed` replaces `.weight`."""
    weights = {f"{layer}.packed": f"{layer}.weight" for layer in layers}
    packed = {weight: name for name, weight in weights.items()}
    sizes = {name: base.spec(weight).numel for name, weight in weights.items()}

    def compute(name: str, start: int, stop: int) -> Iterator[Tensor]:
        weight, border = weights[name], code_bytes(sizes[name])
        done, edge = start, min(stop, border)
        for first, values in _blocks(base, weight, 2 * start, 2 * edge) if start < edge else ():
            here = codes(values, kind)[max(start - first // 2, 0) : edge - first // 2]
            done += here.numel()
            yield here
        if done < edge:  # up to where scales begin
            yield torch.zeros(edge - done, dtype=torch.uint8)
        low, high = max(start - border, 0), stop - border
        if high <= 0:
            return
        span = low // SCALE * BLOCK, math.ceil(high / SCALE) * BLOCK
        for first, values in _blocks(base, weight, *span):
            at = first // BLOCK * SCALE
            yield scales(values).view(torch.uint8)[max(low - at, 0) : high - at]

    specs = {n: TensorSpec((packed_bytes(size),), torch.uint8) for n, size in sizes.items()}
    return ComputedReader(base, specs, compute, [packed.get(name, name) for name in base.names()])


def rounded_reader(base: TensorReader, layers: Collection[str], kind: QuantType) -> ComputedReader:
    """Return `base` with the weights of `layers` as fp32 values that 4 bits hold."""

    def compute(name: str, start: int, stop: int) -> Iterator[Tensor]:
        for first, values in _blocks(base, name, start, stop):
            yield rounded(values, kind)[max(start - first, 0) : stop - first]

    weights = (f"{layer}.weight" for layer in layers)
    specs = {name: base.spec(name)._replace(dtype=torch.float32) for name in weights}
    return ComputedReader(base, specs, compute)


class PackedLinear(nn.Linear):
    """A linear layer whose frozen weight is unpacked for each product."""

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
    """Yield the layers that are quantized: torch's, without the head, whose errors show."""
    for name, module in linear_layers(model):
        if type(module) is nn.Linear:
            yield name, module


class RoundedSource(DerivedSource):
    """`base` in an ordinary module, with weights that 4 bits hold in linear layers."""

    inference_view = ModelSource.inference_view
    export_view = ModelSource.export_view
    reader: Callable[[TensorReader, Collection[str], QuantType], TensorReader] = staticmethod(
        rounded_reader
    )

    def __init__(self, base: ModelSource, kind: QuantType) -> None:
        super().__init__(base)
        self.kind: QuantType = kind

    @functools.cached_property
    def layers(self) -> Collection[str]:
        """The names of these layers. Raises StageError if the model has none."""
        found = frozenset(name for name, _ in quantizable(outline(self.base)))
        if not found:
            raise StageError(
                f"{self.name} has no linear layers to hold in 4 bits", hint="leave out quantize"
            )
        return found

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.base.fingerprint} {self.kind}".encode()).hexdigest()

    def weights(self) -> TensorReader:
        return self.reader(self.base.weights(), self.layers, self.kind)


class PackedSource(RoundedSource):
    """`base` with these weights packed, each unpacked for its product."""

    reader = staticmethod(packed_reader)
    skeleton = of_base("skeleton")

    @functools.cached_property
    def inference_view(self) -> ModelSource:
        return RoundedSource(self.base.inference_view, self.kind)

    @property
    def export_view(self) -> ModelSource:
        return RoundedSource(self.base.export_view, self.kind)

    def build(self) -> nn.Module:
        model = self.base.build()
        for name, module in list(quantizable(model)):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, PackedLinear(module, self.kind))
        return model
