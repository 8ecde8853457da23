"""The live side of wrap.accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from pipeline.contracts.engine import DataAxis
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision
from pipeline.contracts.stage import Context
from pipeline.importing.files import read_config
from stages.wrap import accelerate_compat as compat
from stages.wrap.accelerate import is_sharded
from stages.wrap.load_weights import load_weights
from stages.wrap.materialize import (
    build_empty,
    cast_buffers,
    expected_buffers,
    materialize,
    named_parameters,
)
from stages.wrap.optimizer_step import make_optimizer, make_scaler
from stages.wrap.torch_compat import reshard, sharding_facts
from stages.wrap.torch_engine import TorchEngine, local_parts
from stages.wrap.verify_engine import verify_engine

if TYPE_CHECKING:
    from stages.wrap.accelerate import Accelerate


def build(
    config: Accelerate, ctx: Context, model: ModelSource, precision: Precision, plan: OptimizerPlan
) -> TorchEngine:
    """Build the model, load its weights, and let accelerate wrap it with its optimizer."""
    path = Path(config.config).expanduser()
    sharded = is_sharded(read_config(path).content)
    # Sharding moves each rank's part to the device; a replica lives there from the start.
    home = torch.device("cpu") if sharded else ctx.dist.device
    with contextlib.closing(model.weights()) as reader:  # which tells what does not fit
        module = build_empty(model, precision)
        materialize(module, home, buffer_device=ctx.dist.device)
        load_weights(local_parts(module), reader, ctx)
    cast_buffers(module, precision)
    optimizer = make_optimizer(plan, plan.groups(named_parameters(module)))
    with compat.launched(path, ctx.dist.world_size):
        accelerator = compat.make_accelerator(ctx.dist.device)
        ctx.on_exit(compat.forget)
        wrapped, prepared = accelerator.prepare(module, optimizer)
    engine = AcceleratedEngine(accelerator, wrapped, prepared.optimizer, ctx, precision, plan)
    verify_engine(ctx, engine, _expected(ctx, precision, sharded=sharded))
    return engine


def _expected(ctx: Context, precision: Precision, *, sharded: bool) -> dict[str, Any]:
    replicated = "DistributedDataParallel" if ctx.dist.world_size > 1 else "none"
    return {
        "engine": "fully_shard" if sharded else replicated,
        "world_size": ctx.dist.world_size,
        "master": [precision.master],
        "compute": [precision.compute],
        "reduce": [precision.reduce if sharded else precision.master],
        **expected_buffers(precision),
    }


class AcceleratedEngine(TorchEngine):
    """Model and optimizer as accelerate has wrapped them. Accumulation, clipping and loss scaling
    are this engine's, so that they mean what they mean everywhere."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ctx: Context,
        precision: Precision,
        plan: OptimizerPlan,
    ) -> None:
        self.model = model
        self.device = ctx.dist.device
        self.shard = DataAxis(index=ctx.dist.rank, count=ctx.dist.world_size)
        self.optimizer = optimizer
        self.scaler = make_scaler(precision, next(model.parameters()).device)
        self.plan = plan
        self._accelerator = accelerator

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._accelerator.unwrap_model(self.model)
        return module

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        waiting = contextlib.nullcontext() if last else self._accelerator.no_sync(self.model)
        with waiting:
            yield

    def to_sharded(self) -> None:
        reshard(self.model)

    def describe(self) -> Mapping[str, Any]:
        self.to_sharded()
        common = self.common_facts()
        master = common["master"]
        return {
            "engine": self._kind(),
            "accelerate": str(self._accelerator.distributed_type.value),
            **common,
            "world_size": self._accelerator.num_processes,
            "compute": master,
            "reduce": master,
            **self._sharding(master),
        }

    def _kind(self) -> str:
        if isinstance(self.model, FSDPModule):
            return "fully_shard"
        return "none" if self.model is self.module else type(self.model).__name__

    def _sharding(self, master: list[str]) -> dict[str, Any]:
        """As torch holds it. A policy without a dtype leaves the parameters' own."""
        if not isinstance(self.model, FSDPModule):
            return {}
        facts = sharding_facts(self.model)
        return {key: master if value == [str(None)] else value for key, value in facts.items()}
