"""AdamW with moments in few bits, and with weights that are rounded at random."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stages.optimizer import torchao_compat
from stages.optimizer.quantized_moments import MOMENTS, SMALLEST, MomentPacking


class LowBitAdamW(Optimizer):
    """torchao's update rule (`single_param_adam`, computed in fp32) on this process's own elements
    of each parameter, flat. State: what the packing keeps, and `step`.

    With a `rounding_seed`, weights are bf16 and rounded stochastically; a group's `shard` says
    which part of the parameters this process has.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        packing: MomentPacking,
        rounding_seed: int | None,
        compiled: bool,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._packing = packing
        self._noise = None if rounding_seed is None else Noise(rounding_seed)
        self._update = functools.partial(
            _update, packing=packing, rule=torchao_compat.adam().single_param_adam
        )
        self.compiled: Callable[..., None] = self._update
        """The update of what is in blocks."""
        if compiled:
            self.compiled = torch.compile(self._update, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; `closure` is not called."""
        # Every shape is compiled once, however many there are.
        with torch._dynamo.utils.disable_cache_limit():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if self._noise is not None:
                        self._noise.number(parameter)
                    if parameter.grad is not None and parameter.numel():
                        self._step(parameter, group)

    def _step(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        weights, gradient = _own(parameter), _own(parameter.grad)
        state, count = self.state[parameter], weights.numel()
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update(self._packing.start(weights, count))
        state["step"] += 1
        noise = None
        if self._noise is not None:
            noise = self._noise.bits(parameter, weights, group["shard"], int(state["step"]))
        for start, stop, moments in self._packing.parts(state, count):
            update = self._update if stop - start < SMALLEST else self.compiled
            update(
                weights[start:stop],
                gradient[start:stop],
                moments,
                self._packing.tables(weights.device),
                None if noise is None else noise[start:stop],
                step=state["step"],
                lr=torch.tensor(group["lr"], dtype=torch.float32),  # else it would be compiled in
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts all state to the parameter's dtype; here it keeps its own."""
        super().load_state_dict(state_dict)
        saved = [p for group in state_dict["param_groups"] for p in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and name != "step":
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


def _own(tensor: Tensor | None) -> Tensor:
    """This process's elements, flat."""
    assert tensor is not None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(-1)


def _update(
    weights: Tensor,
    gradient: Tensor,
    moments: Mapping[str, Tensor],
    tables: Mapping[str, Tensor],
    noise: Tensor | None,
    *,
    packing: MomentPacking,
    rule: Callable[..., None],
    step: Tensor,
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    first, second = (packing.decode(moments, name, tables) for name in MOMENTS)
    new = weights.float()
    rule(new, gradient, step, first, second, None, lr, *betas, weight_decay, eps, True, False)
    packing.encode(moments, MOMENTS[0], first, tables)
    packing.encode(moments, MOMENTS[1], second, tables)
    if noise is not None:
        weights.copy_(round_at_random(new, noise))
    elif new is not weights:
        weights.copy_(new)


MASK = -(1 << 16)
"""The bits of an fp32 number that bf16 has."""


def round_at_random(values: Tensor, noise: Tensor) -> Tensor:
    """fp32 values as bf16: each becomes one of its two neighbours, with a probability that makes
    the mean the value itself. `noise` is int32, uniform in [0, 65536), of the same shape."""
    # The bits that bf16 lacks are the fraction of the way to the neighbour away from zero.
    rounded = ((values.view(torch.int32) + noise) & MASK).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


class Noise:
    """Random bits that are a function of seed, shard, parameter and update alone: replicas round
    alike, and nothing has to be saved for a run to go on with the same bits."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: dict[Tensor, int] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    def number(self, parameter: Tensor) -> int:
        """Parameters are told apart by the order in which they are first seen."""
        return self._numbers.setdefault(parameter, len(self._numbers))

    def bits(self, parameter: Tensor, like: Tensor, shard: int, step: int) -> Tensor:
        """int32, uniform in [0, 65536), of the shape and on the device of `like`, for update `step`
        of a parameter."""
        text = f"{self._seed}/{shard}/{self.number(parameter)}/{step}".encode()
        generator = self._generators.get(like.device)
        if generator is None:
            generator = self._generators[like.device] = torch.Generator(like.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)
        return torch.randint(
            1 << 16, like.shape, generator=generator, device=like.device, dtype=torch.int32
        )
