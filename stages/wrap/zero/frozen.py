"""A model that ZeRO holds without training it: whole on every rank, or partitioned by stage 3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline import Context, EngineState, Fragment, ModelSource, OptimizerPlan, Precision
from stages.model.declared import FrozenSource
from stages.wrap.axes import required
from stages.wrap.build import dtype_names, parameter_count, verify_engine
from stages.wrap.context.attention import divide_sequence
from stages.wrap.load_weights import load_weights
from stages.wrap.optimizer_state import fixed_state
from stages.wrap.passes import ModulePasses
from stages.wrap.torch_engine import TorchEngine
from stages.wrap.zero import compat
from stages.wrap.zero.build import close_at_exit, make_module
from stages.wrap.zero.config import generate
from stages.wrap.zero.state import frozen_fragments, frozen_shards
from stages.wrap.zero.tensor_parallel import ZeroDivider

if TYPE_CHECKING:
    from stages.wrap.zero.stage import Zero


def build_frozen(
    stage: Zero, ctx: Context, source: ModelSource, precision: Precision, plan: OptimizerPlan
) -> FrozenZeroEngine:
    """Create the parameters, partitioned at stage 3, and load them."""
    import deepspeed

    config = generate(stage, precision, max_grad_norm=None)
    compat.start(ctx.dist, ctx.log)
    axes, model = required(stage, ctx.dist.world_size), FrozenSource(source)
    with contextlib.closing(model.weights()) as reader:
        divider = ZeroDivider(stage, ctx, axes) if axes.tensor > 1 else None
        live = module = make_module(stage, ctx, model, precision, config, divider)
        group = divide_sequence(module, axes, ctx.dist.device.type)
        if stage.stage == 3:
            groups = None if divider is None else divider.groups
            with compat.quiet():
                live, *_ = deepspeed.initialize(
                    model=module, config=dict(config), dist_init_required=False, mpu=groups
                )
        passes = ModulePasses(module, model.scorer(live, group=group), ctx.dist, axes)
        engine = FrozenZeroEngine(live, passes, [], precision, plan)
        close_at_exit(ctx, engine)
        load_weights(frozen_shards(module, engine.zero), reader, ctx)
    expected = {"world_size": ctx.dist.world_size, "compute": [precision.compute]}
    verify_engine(ctx, engine, expected)
    return engine


class FrozenZeroEngine(TorchEngine):
    """Runs a model whose parameters ZeRO partitions, or none does."""

    def __init__(self, live: Any, *rest: Any) -> None:
        super().__init__(*rest)
        self._live = live

    @property
    def zero(self) -> Any:
        """DeepSpeed's owner of partitions; None without."""
        return getattr(self._live, "optimizer", None)

    @property
    def lasting_fragments(self) -> bool:
        return False

    def state(self) -> EngineState:
        return fixed_state(self.parts[0], [], compat.full_shape)

    def fragments(self) -> Iterator[Fragment]:
        return frozen_fragments(self.parts[0], self.zero)

    def describe(self) -> Mapping[str, Any]:
        return {
            "engine": type(self._live).__name__,
            "world_size": self.passes.axes.ranks,
            "axes": self.passes.axes.sizes,
            "model": type(self.parts[0]).__name__,
            "device": self.device.type,
            "compute": dtype_names(self.parts[0].parameters()),
            "parameters": parameter_count(self.parts[0], compat.full_numel),
            "trained_parameters": 0,
        }

    def close(self) -> None:
        if self.zero is not None:
            self._live.destroy()
            compat.forget_groups()
        del self._live, self.passes, self.parts
