"""The surroundings of a trace: a group of the target size, tensors without values, a meter."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from pipeline.dist import Dist
from pipeline.fake_tensors import without_values
from pipeline.metrics import Metrics
from pipeline.planning.strategy import GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS, WHOLE_GRADIENTS
from pipeline.planning.timeline import LOAD
from pipeline.planning.topology import Topology
from pipeline.planning.trace.meter import Meter, Unit
from pipeline.planning.trace.torch_compat import silent_group, single_group, tensors_in
from pipeline.planning.watch import Watch
from pipeline.stage import Context

START, HEAD, LOSS, INPUT = "start", "head", "loss", "input"
"""Parts of a model that are no block: what runs before the first block and, in backward, what runs
before everything; what runs behind the last block; behind the model; and, in backward, behind all
blocks."""


class Session:
    """A rank on tensors that are metered, without values unless the meter wants real ones."""

    def __init__(self, ctx: Context, meter: Meter, *, fake: bool) -> None:
        self.ctx = ctx
        self.meter = meter
        self.watch = Owners(meter)
        self._mode = without_values() if fake else None

    @contextlib.contextmanager
    def metering(self) -> Iterator[None]:
        """Inside, tensors count, and have no values unless they are to be real."""
        with self._mode or contextlib.nullcontext(), self.meter:
            yield


@contextlib.contextmanager
def session(
    topology: Topology,
    *,
    seed: int,
    meter: Meter | None = None,
    fake: bool = True,
    grouped: bool = True,
) -> Iterator[Session]:
    """Inside, stages run as rank 0 of all ranks, in a process group if it is to be `grouped`.
    Without `fake`, tensors are real, and only the ranks are not, if there are several."""
    silent = fake or topology.ranks > 1
    group = silent_group(topology.ranks) if silent else single_group()
    with (
        tempfile.TemporaryDirectory() as scratch,
        group if grouped else contextlib.nullcontext(),
        contextlib.ExitStack() as stack,
    ):
        place = Dist(
            rank=0,
            world_size=topology.ranks,
            local_rank=0,
            local_world_size=topology.local_ranks,
            device=torch.device("cpu"),
        )
        ctx = context(Path(scratch), place, seed, stack.callback)
        yield Session(ctx, meter or Meter(fake=fake), fake=fake)


def context(folder: Path, place: Dist, seed: int, on_exit: Callable[..., object]) -> Context:
    """What stages are given that are to say nothing, with a folder of their own."""
    log = logging.getLogger("pipe.planning")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    return Context(
        run_dir=folder, seed=seed, dist=place, log=log, metrics=Metrics(None), on_exit=on_exit
    )


class Owners(Watch):
    """Tells the meter where a training is, and whose the memory is."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._phase = LOAD
        self._entered: dict[str, int] = {}
        self._model: nn.Module | None = None
        self._parameters: Sequence[nn.Parameter] = ()

    def loaded(self, model: nn.Module) -> None:
        """The model has all the memory that it keeps."""
        self._model, self._parameters = model, list(model.parameters())
        self._meter.own(PARAMETERS, self._parameters)
        self._meter.own(PARAMETERS, model.buffers())
        self._tell()

    def phase(self, name: str) -> None:
        self._phase = name
        self._entered[name] = self._entered.get(name, -1) + 1
        self.unit(START)

    def unit(self, unit: Unit) -> None:
        """What comes now is of this part of the model."""
        self._tell()
        self._meter.enter((self._phase, self._entered[self._phase], unit))

    def _tell(self) -> None:
        if self._model is None:
            return
        known = set(self._parameters)
        used = [one for one in self._model.parameters() if one not in known]
        self._meter.own(GATHERED, used, replace=False)
        self._meter.own(GRADIENTS, _gradients(self._parameters), replace=False)
        self._meter.own(WHOLE_GRADIENTS, _gradients(used), replace=False)

    @contextlib.contextmanager
    def watching(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, the meter is told which block runs, and what optimizers keep."""
        assert self._model is not None
        handles = [
            register_optimizer_step_post_hook(self._updated),
            self._model.register_forward_hook(self._given),
        ]
        for place, block in enumerate(blocks):
            last = place == len(blocks) - 1
            handles += self._hooks(place, block, last=last)
        yield
        for handle in handles:
            handle.remove()

    def _given(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self.unit(LOSS)
        self._mark(output, HEAD)

    def _mark(self, tensors: Any, unit: Unit) -> None:
        """When backward has the gradient of the first of them, it comes to this part."""
        first = next((one for one in tensors_in(tensors) if one.is_floating_point()), None)
        if first is not None and first.requires_grad:
            first.register_hook(lambda _: self.unit(unit))  # type: ignore[no-untyped-call]

    def _hooks(self, place: int, block: nn.Module, *, last: bool) -> list[RemovableHandle]:
        def before(module: nn.Module, inputs: Any, named: Any) -> None:
            self.unit(place)
            if place == 0:
                self._mark((inputs, named), INPUT)

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self._mark(output, place)
            if last:
                self.unit(HEAD)

        return [
            block.register_forward_pre_hook(before, with_kwargs=True),
            block.register_forward_hook(after),
        ]

    def _updated(self, optimizer: Optimizer, *_: Any) -> None:
        states = optimizer.state.values()
        tensors = [one for state in states for one in state.values() if isinstance(one, Tensor)]
        self._meter.own(OPTIMIZER, tensors)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [one.grad for one in parameters if one.grad is not None]
