"""How parameters come to life: declared empty, then filled tensor by tensor from the source.

Rank 0 reads; every other rank is sent each tensor, so that no file is read twice and no process
ever holds the model twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor, nn

from pipeline.artifacts import (
    ModelSource,
    NamedParameter,
    Precision,
    TensorReader,
    dtype_name,
    torch_dtype,
)
from pipeline.errors import StageError

if TYPE_CHECKING:
    from pipeline.dist import Dist


def build_empty(model: ModelSource, precision: Precision) -> nn.Module:
    """The model with parameters on the meta device in the master dtype, and real buffers."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        module = model.build()
    model.tie(module)
    master = torch_dtype(precision.master)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(master)
    module.train()
    return module


def cast_buffers(module: nn.Module, precision: Precision) -> None:
    """Give every floating buffer the policy's buffer dtype; None leaves what the model declares."""
    if precision.buffer is None:
        return
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(torch_dtype(precision.buffer))


def expected_buffers(precision: Precision) -> dict[str, list[str]]:
    """What a wrap's facts must say of buffers: nothing unless the policy asks for a dtype."""
    return {"buffers": [precision.buffer]} if precision.buffer else {}


@contextlib.contextmanager
def source_reader(model: ModelSource, dist: Dist) -> Iterator[TensorReader | None]:
    """The source's weights, opened on rank 0 only; None elsewhere."""
    if not dist.is_main:
        yield None
        return
    reader = model.weights()
    try:
        yield reader
    finally:
        reader.close()


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a checkpoint of the model holds, tied ones once: parameters, then
    persistent buffers."""
    yield from module.named_parameters()
    persistent = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer


def aliases(module: nn.Module) -> dict[str, str]:
    """Tied parameter's name -> the name under which `named_parameters` lists it."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    return {
        name: first[parameter]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if first[parameter] != name
    }


def fill(
    module: nn.Module,
    model: ModelSource,
    dist: Dist,
    place: Callable[[Tensor, Tensor], object],
) -> None:
    """Fill every stored tensor of `module` from the source (collective).

    `place(target, value)` puts the full `value`, on the run's device and in the target's dtype,
    into the part of it that this rank owns. Raises StageError on a tensor of another shape.
    """
    with source_reader(model, dist) as reader, torch.no_grad():
        for name, target in stored_tensors(module):
            place(target, _received(name, target, reader, dist))


def _received(name: str, target: Tensor, reader: TensorReader | None, dist: Dist) -> Tensor:
    if reader is None:
        value = torch.empty(target.shape, dtype=target.dtype, device=dist.device)
    else:
        value = reader.read(name).to(device=dist.device, dtype=target.dtype).contiguous()
        if value.shape != target.shape:
            raise StageError(
                f"{name}: the source has shape {tuple(value.shape)}, "
                f"the model expects {tuple(target.shape)}"
            )
    if dist.world_size > 1:
        torch.distributed.broadcast(value, src=0)
    return value


def named_parameters(module: nn.Module) -> Iterator[NamedParameter]:
    """The module's parameters, tied ones once, as an OptimizerPlan groups them."""
    for name, parameter in module.named_parameters():
        yield NamedParameter(name, parameter, tuple(parameter.shape))


def materialise(module: nn.Module, device: torch.device, *, buffer_device: torch.device) -> None:
    """Give every meta parameter real, uninitialised storage on `device`, keeping ties; move
    buffers.

    Tied parameters stay one object, which `nn.Module.to_empty` does not promise.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                owner._parameters[name] = made[parameter]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(buffer_device)


def dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    """The distinct floating dtypes among `tensors`, as in a recipe."""
    return sorted({dtype_name(t.dtype) for t in tensors if t.is_floating_point()})
