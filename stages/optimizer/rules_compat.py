"""Optimizer classes of our own: Lion, and AdamW with moments in few bits and stochastic rounding.

Moments are tensors of one dtype, or blocks of 8-bit codes (Dettmers et al. 2022, 8-bit Optimizers
via Block-wise Quantization): each block of values is divided by its largest magnitude, its scale,
and rounded to the nearest values of a code book. Code books and AdamW's rule are in private modules
of torchao 0.18.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline import StateCodec
from pipeline.utils import local_part, optional

MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 256
"""Elements of a block, as in bitsandbytes and torchao."""
SMALLEST = 4096
"""Elements; smaller parameters have no blocks, as in bitsandbytes and torchao."""
LEAST_SCALE = 1e-12
"""Lower bound of scales, as in torchao."""
AT_A_TIME = 1 << 22
"""Elements that are encoded exactly at a time: encoding needs about ten times their memory."""


def torchao(name: str) -> ModuleType:
    """A module of torchao.optim: `adam` has `single_param_adam`, the update rule, and `quant_utils`
    has `create_dynamic_map` and `quantize_8bit_with_qmap`. Raises StageError without torchao."""
    with optional("this optimizer needs torchao", hint="pip install 'pipetrain[torchao]'"):
        return importlib.import_module(f"torchao.optim.{name}")


class CodeBook:
    """The 256 dynamic values of bitsandbytes and torchao, ascending, from 0 or from -0.993 to 1."""

    def __init__(self, *, signed: bool) -> None:
        quantizers = torchao("quant_utils")
        self.values: tuple[float, ...] = tuple(quantizers.create_dynamic_map(signed))
        self._nearest = quantizers.quantize_8bit_with_qmap

    def encode(
        self, blocks: Tensor, table: Tensor, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """uint8 codes (blocks, BLOCK) and fp32 scales (blocks,) of fp32 values (blocks, BLOCK).
        `table` are the book's values as an fp32 tensor (256,)."""
        scales = blocks.abs().amax(-1).clip(LEAST_SCALE) if scales is None else scales
        return self._nearest(blocks / scales.view(-1, 1), table), scales

    def decode(self, codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
        """fp32 values (blocks, BLOCK) of codes and scales."""
        return table[codes.int()] * scales.view(-1, 1)

    def encode_exactly(self, blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Encode values so that results of `decode` are decoded to the same bits again. Blocks
        whose largest value is negative, so 0.993 of its scale, are tried with larger scales."""
        codes, scales = self.encode(blocks, table)
        if self.values[0] >= 0:
            return codes, scales
        left = (self.decode(codes, scales, table) != blocks).any(-1).nonzero().view(-1)
        # Scales by which the least code is decoded to the block's largest value, up to rounding.
        below = above = blocks.abs().amax(-1) / -self.values[0]
        candidates = [below]
        for _ in range(2):
            below = torch.nextafter(below, torch.zeros_like(below))
            above = torch.nextafter(above, torch.full_like(above, torch.inf))
            candidates += [below, above]
        for larger in candidates:
            if not left.numel():
                break
            trial = self.encode(blocks[left], table, larger[left])
            wrong = (self.decode(*trial, table) != blocks[left]).any(-1)
            codes[left[~wrong]], scales[left[~wrong]] = (one[~wrong] for one in trial)
            left = left[wrong]
        return codes, scales


class MomentCodec(StateCodec):
    """The codec for the field `moments` of optimizer.adamw: flat tensors of one dtype, by default
    the parameter's own; with `8bit`, codes and a scale for each block instead, but for small
    parameters and what is left after the last block. Raises StageError without torchao. An update
    decodes the moments of each part, changes and encodes them."""

    def __init__(self, moments: str) -> None:
        dtypes = {"fp32": torch.float32, "8bit": torch.float32, "bf16": torch.bfloat16}
        self._dtype = dtypes.get(moments)
        self._books: dict[str, CodeBook] = {}
        if moments == "8bit":
            first, second = MOMENTS
            self._books = {first: CodeBook(signed=True), second: CodeBook(signed=False)}
        self._tables: dict[torch.device, dict[str, Tensor]] = {}

    def start(self, parameter: Tensor, count: int) -> dict[str, Tensor]:
        device, dtype = parameter.device, self._dtype or parameter.dtype
        whole = count - count % BLOCK if self._books and count >= SMALLEST else 0
        state = {}
        for moment in MOMENTS:
            if whole:
                state[f"{moment}.codes"] = torch.zeros(whole, dtype=torch.uint8, device=device)
                state[f"{moment}.scales"] = torch.zeros(whole // BLOCK, device=device)
            if whole < count or not whole:
                state[moment] = torch.zeros(count - whole, dtype=dtype, device=device)
        return state

    def unpack(self, state: Mapping[str, Any], moment: str, start: int, stop: int) -> Tensor:
        whole, found = _in_blocks(state, moment), []
        if start < whole:
            first, last = start // BLOCK, -(-min(stop, whole) // BLOCK)
            codes, scales = (stored[first:last] for stored in _blocks(state, moment))
            table = self.tables(scales.device)[f"{moment}.table"]
            values = self._books[moment].decode(codes, scales, table).view(-1)
            # + 0.0: with a scale of 0, a negative code is decoded to -0.0
            found.append(values[start - first * BLOCK : min(stop, whole) - first * BLOCK] + 0.0)
        if stop > whole or not whole:
            found.append(state[moment][max(start - whole, 0) : stop - whole])
        return found[0] if len(found) == 1 else torch.cat(found)

    def pack(self, state: Mapping[str, Any], moment: str, values: Tensor) -> None:
        """Encode what `unpack` has decoded; a tensor of another dtype is its own storage."""
        whole = _in_blocks(state, moment)
        if whole and whole < len(values):
            state[moment].copy_(values[whole:])
        if whole:
            codes, scales = _blocks(state, moment)
            table = self.tables(scales.device)[f"{moment}.table"]
            blocks = values[:whole].view(-1, BLOCK)
            for first in range(0, len(scales), AT_A_TIME // BLOCK):
                part = slice(first, first + AT_A_TIME // BLOCK)
                codes[part], scales[part] = self._books[moment].encode_exactly(blocks[part], table)

    def parts(
        self, state: Mapping[str, Tensor], count: int
    ) -> Iterator[tuple[int, int, Mapping[str, Tensor]]]:
        """(start, stop, state) of each part of `count` elements that is stored alike, the state of
        blocks with their `tables`."""
        whole = _in_blocks(state, MOMENTS[0])
        if whole:
            blocks = {key: value for key, value in state.items() if "." in key}
            yield 0, whole, blocks | self.tables(state[f"{MOMENTS[0]}.scales"].device)
        if whole < count:
            yield whole, count, {name: state[name] for name in MOMENTS}

    def tables(self, device: torch.device) -> dict[str, Tensor]:
        """Constants for `decode` and `encode` of blocks on a device."""
        if device not in self._tables:
            self._tables[device] = {
                f"{moment}.table": torch.tensor(book.values, dtype=torch.float32, device=device)
                for moment, book in self._books.items()
            }
        return self._tables[device]

    def decode(self, state: Mapping[str, Tensor], moment: str) -> Tensor:
        """A flat moment of a part. The update may overwrite it and then calls `encode`."""
        if moment in state:
            return state[moment]
        codes, scales = _blocks(state, moment)
        return self._books[moment].decode(codes, scales, state[f"{moment}.table"]).view(-1)

    def encode(self, state: Mapping[str, Tensor], moment: str, values: Tensor) -> None:
        """Store `values`, which are a result of `decode` that the update has overwritten."""
        if moment not in state:
            blocks, table = values.view(-1, BLOCK), state[f"{moment}.table"]
            new = self._books[moment].encode(blocks, table)
            for stored, one in zip(_blocks(state, moment), new, strict=True):
                stored.copy_(one)


def _in_blocks(state: Mapping[str, Any], moment: str) -> int:
    """Number of a parameter's elements that are stored in blocks."""
    return BLOCK * len(state.get(f"{moment}.scales", ()))


def _blocks(state: Mapping[str, Tensor], moment: str) -> tuple[Tensor, Tensor]:
    """Views of the stored codes (blocks, BLOCK) and scales (blocks,)."""
    return state[f"{moment}.codes"].view(-1, BLOCK), state[f"{moment}.scales"]


class LionOptimizer(Optimizer):
    """Chen et al. 2023, algorithm 2: the sign of an average of moment and gradient, with decoupled
    weight decay: `lr`, `betas`, `weight_decay`. An update needs one more tensor of the size."""

    def __init__(self, params: Iterable[dict[str, Any]], **rule: Any) -> None:
        super().__init__(params, rule)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not called."""
        for group in self.param_groups:
            share, decay = group["betas"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                direction = gradient.lerp(state["exp_avg"], share).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])
                state["exp_avg"].lerp_(gradient, 1 - decay)


class LowBitAdamW(Optimizer):
    """torchao's AdamW (`single_param_adam`, computed in fp32) on this process's elements of each
    parameter, flat: `lr`, `betas`, `eps`, `weight_decay`. State: `step`, and what the codec stores.
    With a `rounding_seed`, weights are bf16 and rounded stochastically; each group's `shard` is the
    number of this process's shard."""

    def __init__(
        self, params: Iterable[dict[str, Any]], *, codec: MomentCodec, rounding_seed: int | None,
        compiled: bool, **rule: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, rule)
        self._codec = codec
        self._noise = None if rounding_seed is None else Noise(rounding_seed)
        rule_of_torchao = torchao("adam").single_param_adam
        self._update = functools.partial(_adamw, codec=codec, rule=rule_of_torchao)
        self.compiled: Callable[..., None] = self._update
        """The update of large parts."""
        if compiled:
            self.compiled = torch.compile(self._update, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not called."""
        # Every shape is compiled once, however many there are.
        with torch._dynamo.utils.disable_cache_limit():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if self._noise is not None:
                        self._noise.key(parameter)
                    if parameter.grad is None or not parameter.numel():
                        continue
                    both = (parameter, parameter.grad)
                    weights, gradient = (local_part(one).detach().view(-1) for one in both)
                    state, count, noise = self.state[parameter], weights.numel(), None
                    if not state:
                        state["step"] = torch.zeros((), dtype=torch.float32)
                        state.update(self._codec.start(weights, count))
                    state["step"] += 1
                    if self._noise is not None:
                        step = int(state["step"])
                        noise = self._noise.bits(parameter, weights, group["shard"], step)
                    for start, stop, moments in self._codec.parts(state, count):
                        update = self._update if stop - start < SMALLEST else self.compiled
                        update(
                            weights[start:stop],
                            gradient[start:stop],
                            moments,
                            None if noise is None else noise[start:stop],
                            step=state["step"],
                            # A float would be a constant.
                            lr=torch.tensor(group["lr"], dtype=torch.float32),
                            hyper=(*group["betas"], group["weight_decay"], group["eps"]),
                        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state without torch's cast of every tensor to the parameter's dtype."""
        super().load_state_dict(state_dict)
        saved = [p for group in state_dict["param_groups"] for p in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and name != "step":
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


def _adamw(
    weights: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], noise: Tensor | None, *,
    codec: MomentCodec, rule: Callable[..., None], step: Tensor, lr: Tensor,
    hyper: tuple[float, float, float, float],
) -> None:  # fmt: skip
    first, second = (codec.decode(moments, name) for name in MOMENTS)
    new = weights.float()
    rule(new, gradient, step, first, second, None, lr, *hyper, True, False)
    for name, values in zip(MOMENTS, (first, second), strict=True):
        codec.encode(moments, name, values)
    if noise is not None:
        weights.copy_(round_stochastically(new, noise))
    elif new is not weights:
        weights.copy_(new)


BF16_BITS = -(1 << 16)
"""Mask of the bits of an fp32 number that bf16 has."""


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 values as bf16, each rounded to one of its two neighbours with probabilities
    that make the mean exact. `noise` is int32, uniform in [0, 65536), of the same shape."""
    # The bits that bf16 lacks are the fraction of the way to the neighbour away from zero.
    rounded = ((values.view(torch.int32) + noise) & BF16_BITS).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


@dataclass(eq=False)
class Noise:
    """Random bits as a function of only seed, shard, parameter and update: replicas round alike,
    and a resumed run needs no saved stream."""

    seed: int
    _numbers: dict[Tensor, int] = field(default_factory=dict)

    def key(self, parameter: Tensor) -> str | int:
        """The parameter's name, or its number in the order of first calls: DeepSpeed's flat tensors
        have none, while ranks of a pipeline do not have the same parameters to number."""
        name: str | None = getattr(parameter, "full_name", None)
        return name or self._numbers.setdefault(parameter, len(self._numbers))

    def bits(self, parameter: Tensor, like: Tensor, shard: int, step: int) -> Tensor:
        """int32 noise for a parameter's update `step`, uniform in [0, 65536), shaped `like`."""
        text = f"{self.seed}/{shard}/{self.key(parameter)}/{step}".encode()
        generator = torch.Generator(like.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)
        return torch.randint(
            1 << 16, like.shape, generator=generator, device=like.device, dtype=torch.int32
        )
