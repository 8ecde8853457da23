"""The live side of wrap.zero."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from pipeline.artifacts import OptimizerPlan, Precision
from pipeline.dist import Dist
from pipeline.engine import Admit, DataShard, Engine, EngineState, Fragment, StepReport
from stages.wrap.fill import Part
from stages.wrap.zero import compat
from stages.wrap.zero.admission import Admission
from stages.wrap.zero.facts import facts
from stages.wrap.zero.state import ZeroState


class ZeroEngine(Engine):
    """DeepSpeed's engine behind the common port. Accumulation is unmanaged: gradients are summed
    over micro-batches and applied by one `step`."""

    def __init__(self, live: Any, dist: Dist, precision: Precision, plan: OptimizerPlan) -> None:
        self.deepspeed = live
        self.model = live
        self.device = dist.device
        self.shard = DataShard(index=dist.rank, count=dist.world_size)
        self._scaling = precision.loss_scaling
        self._max_grad_norm = plan.max_grad_norm
        # Groups are renewed when a checkpoint is loaded, base rates are not.
        self._base_rates = [group["lr"] for group in compat.update_groups(live)]
        interval = self._scaling.growth_interval if self._scaling else 1
        self._admission = Admission(compat.inner_optimizers(live))
        self._state = ZeroState(live, plan, self._base_rates, interval)

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def step(self, *, lr_scale: float, admit: Admit | None = None) -> StepReport:
        live = self.deepspeed
        for group, base in zip(compat.update_groups(live), self._base_rates, strict=True):
            group["lr"] = base * lr_scale
        scaler = compat.loss_scaler(live)
        scale = 1.0 if scaler is None else float(scaler.cur_scale)
        with self._admission.asking(admit, lambda: compat.global_grad_norm(live)) as answer:
            live.step()
        finite = bool(live.was_step_applied())
        if finite:
            self._grow_scale(scaler)
        applied = finite and not answer.refused
        self._state.applied += applied
        norm = live.get_global_grad_norm()
        return StepReport(grad_norm=float(norm), applied=applied, loss_scale=scale)

    def _grow_scale(self, scaler: Any | None) -> None:
        # DeepSpeed grows the scale before it unscales the gradients of the same step, which
        # halves them; so its window never ends and the growth is done here, between steps.
        if scaler is None or self._scaling is None:
            return
        if compat.steps_since_overflow(scaler) % self._scaling.growth_interval == 0:
            scaler.cur_scale *= scaler.scale_factor

    def state(self) -> EngineState:
        return self._state.tell()

    def fragments(self) -> Iterator[Fragment]:
        return self._state.fragments()

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        return self._state.restore(state)

    def refresh(self) -> None:
        self._state.refresh()

    def weights(self) -> Iterator[Part]:
        """See ZeroState."""
        return self._state.weights()

    def facts(self) -> Mapping[str, Any]:
        return facts(self.deepspeed)

    def close(self) -> None:
        if self.deepspeed is not None:
            live, self.deepspeed = self.deepspeed, None
            del self.model, self._state
            live.destroy()
