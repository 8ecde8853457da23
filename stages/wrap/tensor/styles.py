"""How the forward of a layer changes when tensor-parallel ranks divide its weights.

Weights are DTensors, for sharding and saving; layers compute with their local tensors, and say
themselves what is communicated. Forward methods are replaced, not modules: names stay, hooks of a
strategy stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pipeline.utils import local_part, own_chunk
from stages.collectives import (
    SEQUENCE,
    all_reduce,
    gather,
    reduce_scatter,
    split,
    sum_gradients,
)

Forward = Callable[..., Any]


Locals = Callable[[], dict[str, Tensor]]
"""The local tensors of a module's parameters by name, without those that it finds already."""


def use_local_parameters(
    module: nn.Module, group: ProcessGroup, summed: frozenset[str], hidden: Mapping[str, Any]
) -> Locals:
    """Let `module` find local tensors under its parameters' names while its forward runs; returns
    what finds them.

    Gradients of those in `summed` are added up over the ranks, in fp32. Gradients in `hidden` are
    replaced by values that leave them out.
    """
    names = [name for name, one in module._parameters.items() if one is not None]

    def find() -> dict[str, Tensor]:
        return {
            name: hidden[name](module) if name in hidden else local(module, name, group, summed)
            for name in names
            if name not in module.__dict__
        }

    def localized(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        found = find()
        # Attributes are looked up here before they are in `_parameters`.
        module.__dict__.update(found)
        try:
            return forward(*args, **kwargs)
        finally:
            for name in found:
                del module.__dict__[name]

    if names:
        replace_forward(module, localized)
    return find


def find_ahead(module: nn.Module, within: Mapping[nn.Module, Locals]) -> None:
    """Let all modules `within` one find local tensors before it runs, as it may read weights of
    modules that it does not call. A compiled block needs that too: torch 2.13 fails to compile what
    is recomputed if it begins with DTensors, whose mesh it takes for one of the tensors that it
    keeps for backward."""

    def around(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        found = {one: find() for one, find in within.items()}
        for one, tensors in found.items():
            one.__dict__.update(tensors)
        try:
            return forward(*args, **kwargs)
        finally:
            for one, tensors in found.items():
                for name in tensors:
                    del one.__dict__[name]

    replace_forward(module, around)


def local(
    module: nn.Module, name: str, group: ProcessGroup, summed: frozenset[str] = frozenset()
) -> Tensor:
    """This rank's part of a parameter, differentiable."""
    parameter: Any = module._parameters[name]
    value = local_part(parameter)
    if name in summed:
        return sum_gradients(value.float(), group).to(value.dtype)
    return value


def replace_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Call `around(forward, *args, **kwargs)` in place of the forward method."""
    forward = module.forward

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(forward, *args, **kwargs)

    module.forward = replaced


def change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the hidden states that `module` is called with."""

    def around(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if args:
            return forward(change(args[0]), *args[1:], **kwargs)
        return forward(**{**kwargs, "hidden_states": change(kwargs["hidden_states"])})

    replace_forward(module, around)


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the hidden states that `module` returns, alone or first in a tuple."""

    def around(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    replace_forward(module, around)


def install_columns(module: nn.Module, group: ProcessGroup, *, sums: bool, gathers: bool) -> None:
    """A linear layer that computes this rank's part of the outputs, from complete inputs."""
    one: Any
    for one in module.modules():
        if hasattr(one, "nf"):  # GPT-2's layers give their output this width
            one.nf = one.nf // dist.get_world_size(group)
    if gathers:
        change_output(module, lambda value: gather(value, group, -1, summands=False))
    if sums:
        change_input(module, lambda value: sum_gradients(value, group))


def install_rows(
    module: nn.Module,
    group: ProcessGroup,
    *,
    splits: bool,
    scatters: bool,
    bias: Callable[[], Tensor] | None,
) -> None:
    """A linear layer that takes this rank's part of the inputs; its outputs are summed over ranks,
    to be complete or, with `scatters`, sharded along the sequence. The bias is added behind."""

    def reduced(value: Tensor) -> Tensor:
        total = reduce_scatter(value, group, SEQUENCE) if scatters else all_reduce(value, group)
        return total if bias is None else total + bias()

    change_output(module, reduced)
    if splits:
        change_input(module, lambda value: split(value, group, -1))


def install_embedding(module: nn.Module, mesh: DeviceMesh) -> None:
    """An embedding of which each rank has rows; tokens of others come as zeros, and are added."""
    assert isinstance(module, nn.Embedding)
    own, group = own_chunk(module.num_embeddings, mesh), mesh.get_group()
    if module.padding_idx is not None:
        module.padding_idx = own.index(module.padding_idx) if module.padding_idx in own else None

    def around(forward: Forward, tokens: Tensor) -> Tensor:
        here = (tokens >= own.start) & (tokens < own.stop)
        found: Tensor = forward(torch.where(here, tokens - own.start, 0))
        return all_reduce(found.masked_fill(~here[..., None], 0), group)

    replace_forward(module, around)


def install_head(module: nn.Module, mesh: DeviceMesh, vocabulary: int) -> None:
    """An output layer whose logits stay sharded by the vocabulary, as a DTensor that says so."""
    group = mesh.get_group()

    def sharded(value: Tensor) -> Tensor:
        shape = (*value.shape[:-1], vocabulary)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            value, mesh, [Shard(-1)], run_check=False, shape=torch.Size(shape), stride=stride
        )

    change_output(module, sharded)
    change_input(module, lambda value: sum_gradients(value, group))


def install_experts(module: nn.Module, group: ProcessGroup) -> None:
    """Experts each of which is divided: called with complete states, indices and weights."""

    def around(forward: Forward, hidden: Tensor, *routing: Any, **kwargs: Any) -> Any:
        summed = [
            sum_gradients(one, group)
            if isinstance(one, Tensor) and one.is_floating_point()
            else one
            for one in routing
        ]
        return all_reduce(forward(sum_gradients(hidden, group), *summed, **kwargs), group)

    replace_forward(module, around)


def install_latent(module: nn.Module, group: ProcessGroup, rope: int) -> None:
    """The layer of latent attention whose last `rope` outputs all of a rank's heads use."""

    def around(value: Tensor) -> Tensor:
        latent, rotary = torch.split(value, [value.shape[-1] - rope, rope], dim=-1)
        return torch.cat([latent, sum_gradients(rotary, group)], dim=-1)

    change_output(module, around)


def share_heads(module: nn.Module, mesh: DeviceMesh, heads: int) -> dict[str, Any]:
    """Replacements of a key or value layer's parameters by the rows of the one head that this
    rank's queries attend to."""
    group, number = mesh.get_group(), mesh.get_local_rank() * heads // mesh.size()

    def own(name: str) -> Callable[[nn.Module], Tensor]:
        def narrowed(owner: nn.Module) -> Tensor:
            whole = local(owner, name, group, frozenset({name}))
            width = whole.shape[0] // heads
            return whole.narrow(0, number * width, width)

        return narrowed

    return {name: own(name) for name, one in module._parameters.items() if one is not None}
