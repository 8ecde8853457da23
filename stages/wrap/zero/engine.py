"""The live half of wrap.zero: a model that DeepSpeed trains, or holds without training it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from pipeline import (
    WEIGHT,
    CheckpointError,
    EngineState,
    Fragment,
    LossParts,
    MicroBatch,
    Objective,
    OptimizerPlan,
    Precision,
    StepGuard,
    StepReport,
    Unit,
)
from stages.objectives.cross_entropy import StepSums
from stages.wrap.build import dtype_names, parameter_count, trained
from stages.wrap.optimizer_state import (
    declared_state,
    fixed_state,
    group_state,
    read_moments,
    require_known,
    set_updates,
    updates,
    write_moments,
)
from stages.wrap.passes import Passes
from stages.wrap.torch_engine import TorchEngine
from stages.wrap.zero import compat
from stages.wrap.zero.partitions import (
    FlatMaster,
    flat_masters,
    frozen_fragments,
    update_compute_weights,
)


class ZeroEngine(TorchEngine):
    """DeepSpeed's engine. Accumulation is unmanaged: gradients are summed over micro-batches and
    applied by one `step`. A model without an optimizer is partitioned at stage 3, else whole."""

    def __init__(
        self, live: Any, passes: Passes, precision: Precision, plan: OptimizerPlan
    ) -> None:
        """`live` is DeepSpeed's engine, or the module if nothing is partitioned."""
        super().__init__(passes, [], precision, plan)
        self.deepspeed = live
        self._base_rates: list[float] = []
        if plan.parts:
            # Groups are renewed when a checkpoint is loaded, base rates are not.
            self._base_rates = [group["lr"] for group in self.zero.optimizer.param_groups]
            compat.set_loss_scale(self.zero, self._scale)

    @property
    def zero(self) -> Any:
        """DeepSpeed's owner of partitions; None without."""
        return getattr(self.deepspeed, "optimizer", None)

    @functools.cached_property
    def _flats(self) -> list[FlatMaster]:
        return list(flat_masters(self.zero, self.parts[0])) if self.plan.parts else []

    def accumulate(
        self, batches: Iterable[MicroBatch], objective: Objective, *, counts: Mapping[Unit, float]
    ) -> LossParts:
        sums = StepSums(objective, self.device, counts, factor=self.averaged_over)
        backward = functools.partial(self.deepspeed.backward, scale_wrt_gas=False)
        return self.passes.train(batches, sums, self.microbatch, backward)

    def step(
        self, *, lr_scales: Sequence[float], should_step: StepGuard | None = None
    ) -> StepReport:
        self.announce_change()
        live, optimizer, (rule,) = self.deepspeed, self.zero.optimizer, self.plan.parts
        for group, base in zip(optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * lr_scales[0]
        scale, update, asked = self._scale, optimizer.step, list[bool]()

        def guarded(*args: Any, **kwargs: Any) -> Any:
            # DeepSpeed updates in several parts, and asks for none where gradients overflowed.
            if should_step is not None and not asked:
                asked.append(should_step(compat.running_grad_norm(live)))
            return update(*args, **kwargs) if all(asked) else None

        optimizer.step = guarded
        try:
            # The first update here shows what the rule keeps.
            with nullcontext() if self._applied else declared_state(optimizer, rule):
                live.step()
        finally:
            del optimizer.step
        finite = bool(live.was_step_applied())
        if self.scaler is not None:
            self.scaler.update(overflowed=not finite)
        compat.set_loss_scale(self.zero, self._scale)
        applied = finite and all(asked)
        self._applied += applied
        norm = float(live.get_global_grad_norm())
        return StepReport(grad_norm=norm, applied=applied, loss_scale=scale)

    def state(self) -> EngineState:
        counts, names = dict[str, int](), dict[int, list[str]]()
        for flat in self._flats:
            kept = self._optimizer_state(flat)
            for name in flat.names:
                counts[name] = updates(kept, self._restored.get(name, 0) + self._applied)
            names.setdefault(flat.group, []).extend(flat.names)
        groups = []
        for at in sorted(names):
            given = {**self.zero.optimizer.param_groups[at], "lr": self._base_rates[at]}
            groups.append(group_state(self.plan.parts[0], given, names[at]))
        fixed = fixed_state(self.parts[0], groups, compat.full_shape)
        scale = None if self.scaler is None else self.scaler.state
        return dataclasses.replace(fixed, updates=counts, loss_scale=scale)

    @property
    def lasting_fragments(self) -> bool:
        return bool(self.plan.parts) and "nvme" not in compat.offload_devices(self.zero)

    def fragments(self) -> Iterator[Fragment]:
        yield from self._trained(write=False)
        yield from frozen_fragments(self.parts[0], self.zero)

    def restore(self, state: EngineState) -> Iterator[Fragment]:
        self.announce_change()
        self._restored, self._applied = state.updates, 0
        for flat in self._flats:
            counts = {name: state.updates[name] for name in flat.names}
            if len(set(counts.values())) > 1:
                message = "parameters that ZeRO updates together were updated unequally often"
                raise CheckpointError(f"{message}: {counts}")
        yield from self._trained(write=True)
        yield from frozen_fragments(self.parts[0], self.zero)
        compat.restore_bias_correction(self.zero.optimizer)
        if self.scaler is not None and state.loss_scale is not None:
            self.scaler.restore(state.loss_scale)
        compat.set_loss_scale(self.zero, self._scale)

    def _trained(self, *, write: bool) -> Iterator[Fragment]:
        for flat in self._flats:
            rule = self.plan.parts[0]
            with flat.present(write=write):
                state, moments = self._optimizer_state(flat), dict[str, Tensor]()
                if write:
                    set_updates(state, self._restored[flat.names[0]])
                    # Written as a whole, as blocks of packed values straddle parameters; read in
                    # parts, as there may be no memory for a whole unpacked moment during training.
                    moments = read_moments(state, rule, 0, flat.tensor.numel())
                for part in flat.parts:
                    own = {name: part.of(values) for name, values in moments.items()}
                    own = own or read_moments(state, rule, part.low, part.low + part.length)
                    yield from part.fragments({WEIGHT: part.of(flat.tensor), **own})
                write_moments(state, rule, moments)

    def _optimizer_state(self, flat: FlatMaster) -> dict[str, Any]:
        """Optimizer state of a flat master, created as the optimizer's first step would."""
        optimizer, master, (rule,) = self.zero.optimizer, flat.tensor, self.plan.parts
        if not optimizer.state[master]:
            compat.start_optimizer_state(optimizer, master, flat.numel, rule)
        state: dict[str, Any] = optimizer.state[master]
        require_known(state, rule, type(optimizer).__name__, master)
        return state

    def weights(self) -> Iterator[Fragment]:
        """This rank's part of every master, frozen parameter and stored buffer, to be overwritten,
        each before the next is taken. Then call `sync_compute_weights`."""
        for flat in self._flats:
            with flat.present(write=True):
                for part in flat.parts:
                    yield from part.fragments({WEIGHT: part.of(flat.tensor)})
        yield from frozen_fragments(self.parts[0], self.zero)

    def sync_compute_weights(self) -> None:
        if self.plan.parts:
            update_compute_weights(self.zero)

    def describe(self) -> Mapping[str, Any]:
        """Read off the engine, its optimizers and its tensors, not off a configuration."""
        (module,) = self.parts
        facts = {
            "engine": type(self.deepspeed).__name__,
            "model": type(module).__name__,
            "world_size": self.passes.axes.ranks,
            "axes": self.passes.axes.sizes,
            "device": self.device.type,
            "compute": dtype_names(module.parameters()),
            "buffers": dtype_names(module.buffers()),
            "parameters": parameter_count(module, compat.full_numel),
            "trained_parameters": sum(map(compat.full_numel, trained(module))),
        }
        return facts | (compat.facts(self.deepspeed) if self.plan.parts else {})

    def close(self) -> None:
        if self.deepspeed is None:
            return
        if self.zero is not None:
            compat.destroy(self.deepspeed)
        self.deepspeed = None
        del self.passes, self.parts
        vars(self).pop("_flats", None)
