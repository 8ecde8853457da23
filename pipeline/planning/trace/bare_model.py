"""A model without weights' values and without a strategy: what its own tensors take."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.contracts.engine import DataAxis, Engine, StepGuard, StepReport
from pipeline.contracts.model import ModelSource
from pipeline.contracts.precision import Precision, torch_dtype
from pipeline.contracts.tensors import TensorReader, TensorSpec
from pipeline.planning.planner import Topology
from pipeline.planning.trace.marks import Marks
from pipeline.planning.trace.torch_compat import cast_in
from pipeline.utils.fake_tensors import with_values


class BareEngine(Engine):
    """Weights in the compute dtype; their gradients are dropped as soon as they are there. Tied
    ones are two, so that no gradient waits for another: that is up to the strategy. Blocks are
    given the compute dtype, as strategies that gather blocks give it."""

    def __init__(
        self, source: ModelSource, precision: Precision, topology: Topology, marks: Marks
    ) -> None:
        compute = torch_dtype(precision.compute)
        with with_values():
            with torch.device("meta"):
                model = source.build()
            source.tie(model)
            first = {parameter: name for name, parameter in model.named_parameters()}
            every = model.named_parameters(remove_duplicate=False)
            self.names = {name: first[parameter] for name, parameter in every}
            """Parameter -> the parameter it is tied to, or itself."""
            _cast(first, compute)
            if precision.buffer is not None:
                _cast(model.buffers(), torch_dtype(precision.buffer))
        self.model = model.to_empty(device="cpu").train()
        self.device = torch.device("cpu")
        self.shard = DataAxis(index=0, count=topology.ranks)

        def enter(module: nn.Module, inputs: Any, named: Any) -> Any:
            return cast_in((inputs, named), compute)

        for block in source.blocks(self.model):
            block.register_forward_pre_hook(enter, with_kwargs=True)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self._drop_gradient(name, parameter, marks)

    def _drop_gradient(self, name: str, parameter: nn.Parameter, marks: Marks) -> None:
        def drop(parameter: Tensor) -> None:
            parameter.grad = None
            marks.part(name)

        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, *, lr_scale: float, should_step: StepGuard | None = None) -> StepReport:
        return StepReport(grad_norm=1.0, applied=False)

    def _absent(self, *given: Any) -> Any:
        """Refuse: a bare model has neither masters nor state."""
        raise NotImplementedError

    describe = state = fragments = restore = sync_compute_weights = _absent  # type: ignore[assignment]


def _cast(tensors: Any, dtype: torch.dtype) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def with_zero_weights(source: ModelSource) -> ModelSource:
    """A source like this one, with a reader that reads nothing."""
    same = copy.copy(source)
    same.weights = ZeroReader  # type: ignore[method-assign]
    return same


class ZeroReader(TensorReader):
    """Reader of tensors of zeros. With uninitialised memory, gradients might not be finite, and
    some strategies leave such updates out."""

    as_stored = True

    def names(self) -> Collection[str]:
        return ()

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(shape=(), dtype=torch.float32)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        return iter(())

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        out.zero_()
