"""How the forward of a layer changes when tensor-parallel ranks divide its weights.

Weights are DTensors, for sharding and saving; layers compute with their local tensors, and say
themselves what is communicated. Forward methods are replaced, not modules: names stay, hooks of a
strategy stay outside.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pipeline.utils import own_chunk
from stages.collectives import all_reduce, sum_gradients

Forward = Callable[..., Any]
Change = Callable[[Tensor], Tensor]
Values = Mapping[nn.Module, Mapping[str, Callable[[], Tensor]]]
"""Module -> name of a direct parameter -> function that returns the local tensor to use."""


def use_local_values(module: nn.Module, values: Values) -> None:
    """Let modules find local tensors under their parameters' names while the forward of `module`
    runs, unless they find them already."""

    def around(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        new = [(one, n) for one, own in values.items() for n in own if n not in one.__dict__]
        try:
            for one, name in new:
                # Attributes are looked up here before they are in `_parameters`.
                one.__dict__[name] = values[one][name]()
            return forward(*args, **kwargs)
        finally:
            for one, name in new:
                one.__dict__.pop(name, None)

    replace_forward(module, around)


def replace_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Call `around(forward, *args, **kwargs)` instead of the forward method."""
    module.forward = functools.partial(around, module.forward)


def change(module: nn.Module, *, before: Change | None = None, after: Change | None = None) -> None:
    """Change the hidden states that `module` takes, and those that it returns, by themselves or
    first in a tuple."""

    def around(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if before is not None and args:
            args = before(args[0]), *args[1:]
        elif before is not None:
            kwargs = {**kwargs, "hidden_states": before(kwargs["hidden_states"])}
        output = forward(*args, **kwargs)
        if after is None:
            return output
        return (after(output[0]), *output[1:]) if isinstance(output, tuple) else after(output)

    replace_forward(module, around)


def install_embedding(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank looks up its rows of the embedding, and zeros for others; then ranks are summed."""
    assert isinstance(module, nn.Embedding)
    own, group = own_chunk(module.num_embeddings, mesh), mesh.get_group()
    if module.padding_idx is not None:
        module.padding_idx = own.index(module.padding_idx) if module.padding_idx in own else None

    def around(forward: Forward, tokens: Tensor) -> Tensor:
        here = (tokens >= own.start) & (tokens < own.stop)
        found: Tensor = forward(torch.where(here, tokens - own.start, 0))
        return all_reduce(found.masked_fill(~here[..., None], 0), group)

    replace_forward(module, around)


def install_experts(module: nn.Module, group: ProcessGroup) -> None:
    """Each rank has a part of every expert; states, indices and weights come complete."""

    def around(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        summed = (
            sum_gradients(one, group)
            if isinstance(one, Tensor) and one.is_floating_point()
            else one
            for one in args
        )
        return all_reduce(forward(*summed, **kwargs), group)

    replace_forward(module, around)


def whole_logits(value: Tensor, *, mesh: DeviceMesh, vocabulary: int) -> Tensor:
    """Logits of this rank's part of the vocabulary, as a DTensor that says so."""
    whole = torch.empty(*value.shape[:-1], vocabulary, device="meta")
    return DTensor.from_local(
        value, mesh, [Shard(-1)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def latent_states(value: Tensor, *, group: ProcessGroup, rope: int) -> Tensor:
    """Outputs of latent attention's first layer; all ranks' heads use the last `rope` of them."""
    latent, rotary = torch.split(value, [value.shape[-1] - rope, rope], dim=-1)
    return torch.cat([latent, sum_gradients(rotary, group)], dim=-1)


SEEDS = 1 << 40
STRIDE = 0x9E3779B1  # odd, so that places in one block have different seeds


@dataclass(frozen=True)
class Streams:
    """Random numbers of dropout on one of `size` ranks: different masks on what ranks divide, equal
    ones on what each has whole.

    Ranks of a group begin a step with equal states of torch's generators. Within a block, or a
    layer that ranks divide, these are seeded by a number that all ranks draw alike, with or without
    their rank. There is no other state, so checkpoints and activation checkpointing need not know.
    The number is part of the seed, so that it is known in a recomputed part too. No device is
    waited for.
    """

    rank: int
    size: int

    @contextlib.contextmanager
    def within(self, place: int | None = None) -> Iterator[None]:
        """Draw other numbers than the other ranks, where all would draw the same; or, inside of
        such a context, the same numbers at a `place`."""
        drawn = None if place is not None else int(torch.randint(SEEDS, (), device="cpu"))
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            self.switch(place or 0, shared=place is not None, drawn=drawn)
            yield

    def switch(self, place: int, *, shared: bool, drawn: int | None = None) -> None:
        """Inside of `within`: draw a place's numbers up to its end."""
        if drawn is None:
            drawn = torch.initial_seed() // (self.size + 1)
        seed = (drawn + place * STRIDE) % SEEDS
        torch.manual_seed(seed * (self.size + 1) + (0 if shared else 1 + self.rank))


def draw_within(module: nn.Module, streams: Streams, place: int | None = None) -> None:
    """Run the forward of `module` in a stream (`Streams.within`) while it trains."""

    def around(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        with streams.within(place) if module.training else contextlib.nullcontext():
            return forward(*args, **kwargs)

    replace_forward(module, around)


def has_dropout(module: nn.Module) -> bool:
    """Whether `module` draws random numbers in training."""
    return any(
        (isinstance(one, nn.Dropout) and one.p > 0)
        or any("drop" in n and isinstance(p, float) and p > 0 for n, p in vars(one).items())
        for one in module.modules()
    )
