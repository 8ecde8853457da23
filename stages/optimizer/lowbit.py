"""AdamW with moments in few bits, and with weights that are rounded at random."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stages.optimizer import torchao_compat
from stages.optimizer.packings import MOMENTS, SMALLEST, MomentPacking
from stages.optimizer.rounding import Noise, round_at_random


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
