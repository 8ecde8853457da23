"""Optimizer classes of our own: Lion, and AdamW with low-bit moments and stochastic rounding."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline.utils import local_part
from stages.optimizer.moments_compat import MOMENTS, SMALLEST, MomentCodec, torchao


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
                    if parameter.grad is not None and parameter.numel():
                        self._step(parameter, parameter.grad, group)

    def _step(self, parameter: Tensor, whole: Tensor, group: Mapping[str, Any]) -> None:
        weights, gradient = (local_part(one).detach().view(-1) for one in (parameter, whole))
        state, count, noise = self.state[parameter], weights.numel(), None
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update(self._codec.start(weights, count))
        state["step"] += 1
        if self._noise is not None:
            noise = self._noise.bits(parameter, weights, group["shard"], int(state["step"]))
        for start, stop, moments in self._codec.parts(state, count):
            update = self._update if stop - start < SMALLEST else self.compiled
            update(
                weights[start:stop],
                gradient[start:stop],
                moments,
                None if noise is None else noise[start:stop],
                step=state["step"],
                lr=torch.tensor(group["lr"], dtype=torch.float32),  # a float would be a constant
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


class Noise:
    """Random bits as a function of only seed, shard, parameter and update: replicas round alike,
    and a resumed run needs no saved stream."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: dict[Tensor, int] = {}

    def key(self, parameter: Tensor) -> str | int:
        """The parameter's name, or its number in the order of first calls: DeepSpeed's flat tensors
        have none, while ranks of a pipeline do not have the same parameters to number."""
        name: str | None = getattr(parameter, "full_name", None)
        return name or self._numbers.setdefault(parameter, len(self._numbers))

    def bits(self, parameter: Tensor, like: Tensor, shard: int, step: int) -> Tensor:
        """int32 noise for a parameter's update `step`, uniform in [0, 65536), shaped `like`."""
        text = f"{self._seed}/{shard}/{self.key(parameter)}/{step}".encode()
        generator = torch.Generator(like.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)
        return torch.randint(
            1 << 16, like.shape, generator=generator, device=like.device, dtype=torch.int32
        )
