"""How parameters come to life: declared empty, given memory, and filled from the source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import NamedParameter
from pipeline.contracts.precision import Precision, dtype_name, torch_dtype
from pipeline.hardware.host import model_begins
from pipeline.utils.fake_tensors import with_values
from stages.model.declared import outline, stands_for


def build_empty(model: ModelSource, precision: Precision) -> nn.Module:
    """The model with parameters on the meta device in the master dtype, those of the frozen base in
    the compute dtype, and real buffers.

    Bytes are held as if they were of that dtype, so that engines, which send and gather tensors of
    one dtype together, do not change them.
    """
    with with_values():
        module = outline(model)
        model_begins()  # importing its code is no part of it
        frozen_base = set(model.frozen_base)
        for name, parameter in module.named_parameters():
            dtype = torch_dtype(precision.compute if name in frozen_base else precision.master)
            bits = parameter.dtype == torch.uint8
            parameter.data = parameter.data.view(dtype) if bits else parameter.data.to(dtype)
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


def named_parameters(module: nn.Module, *, shard: int = 0) -> Iterator[NamedParameter]:
    """The module's parameters, tied ones once, as an OptimizerPlan groups them; of sharded ones
    this process has number `shard`."""
    for name, parameter in module.named_parameters():
        yield NamedParameter(name, parameter, tuple(parameter.shape), shard)


def materialize(module: nn.Module, device: torch.device, *, buffer_device: torch.device) -> None:
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


def trained(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that the optimizer updates."""
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def parameter_count(
    module: nn.Module, elements: Callable[[nn.Parameter], int] = nn.Parameter.numel
) -> int:
    """Elements of the model's weights, tied ones once, in whatever form they are held."""
    known = stands_for(module)
    named = module.named_parameters()
    return sum(known.get(name) or elements(parameter) for name, parameter in named)


def dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    """The distinct floating dtypes among `tensors`, as in a recipe."""
    return sorted({dtype_name(t.dtype) for t in tensors if t.is_floating_point()})
