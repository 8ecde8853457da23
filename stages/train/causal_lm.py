"""Training of a causal language model, and a finished training in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pipeline import (
    Checkpoints,
    Context,
    Data,
    Engine,
    ModelSource,
    OptimizerPlan,
    PlanView,
    Problem,
    Progress,
    ResourceNeed,
    StepCallback,
    TrainedRun,
    traits,
)
from pipeline.utils import address_problems, expanded
from stages.fields import epoch_problems, mixed_problems
from stages.model.config_checks import (
    config_of,
    has_experts,
    table_of_positions,
    tokenizer_problems,
)
from stages.train.settings import CausalLmFields, heldout_problems


@dataclass(frozen=True, kw_only=True)
class TrainCausalLm(CausalLmFields):
    """Train on next-token prediction; the same samples in the same order under every strategy."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        # Next to the checkpoint stage: rollbacks, and evaluations that it compares.
        saving = plan.producer(self, Checkpoints)
        every = saving.every if isinstance(saving, traits.SavesEvery) else None
        if self.anomalies.rolls_back and saving is not None and every is None:
            field = "non_finite" if self.anomalies.non_finite == "rollback" else "spike"
            message = (
                "rollback goes back to the newest checkpoint, and none is saved before the end"
            )
            hint = "set every in the checkpoint slot"
            yield Problem(key=f"anomalies.{field}", message=message, hint=hint)
        best = saving.retention.best if isinstance(saving, traits.RetainsCheckpoints) else 0
        if self.eval_every is None:
            hint = "set eval_every"
            if self.early_stopping is not None:
                message = "needs evaluations before the end"
                yield Problem(key="early_stopping", message=message, hint=hint)
            if best:
                message = "the checkpoint slot's keep_best compares evaluations: one is too few"
                yield Problem(key="eval_every", message=message, hint=hint)
        if self.result == "best" and saving is not None and not best:
            message = "the checkpoint slot does not keep the best checkpoint"
            yield Problem(key="result", message=message, hint="set keep_best: 1 there")
        yield from heldout_problems(self, plan, self.fields_needing_heldout)
        yield from epoch_problems([self], plan, eval_every=self.eval_every)
        # Of the model, by its config if that can be read without a network.
        config, weight, generate = config_of(self, plan), self.router_loss, self.generate
        if config and weight is None and config.get("output_router_logits") is True:
            yield Problem(
                key="router_loss",
                message="the model's config asks for the loss of its router (output_router_logits)",
                hint="router_loss: config adds it, 0 says that it is left out",
                warning=True,
            )
        if config is not None and weight is not None and not has_experts(config):
            message = "the model has no experts"
            yield Problem(key="router_loss", message=message, hint="leave out router_loss")
        if generate is not None:
            without = "leave out `generate.chat`" if generate.chat else None
            for problem in tokenizer_problems(self, plan, no_template=without):
                yield replace(problem, key="generate")
            positions = table_of_positions(config or {})
            if positions is not None and generate.max_tokens > positions:
                yield Problem(
                    key="generate.max_tokens",
                    message=f"is {generate.max_tokens}, and the model has {positions} positions",
                    hint="leave room for the prompt, too",
                )
        yield from mixed_problems(self, plan)

    def resource_needs(
        self, ctx: Context, data: Data, checkpoints: Checkpoints
    ) -> Iterator[ResourceNeed]:
        return checkpoints.resource_needs(self.length_on(data, checkpoints))

    def run(
        self, ctx: Context, engine: Engine, data: Data, optimizer: OptimizerPlan,
        checkpoints: Checkpoints, model: ModelSource, callback: StepCallback | None = None,
    ) -> TrainedRun:  # fmt: skip
        from stages.train.loop import Training

        training = Training(self, ctx, engine, data, optimizer, checkpoints, model, callback)
        return training.run()

    def verify_result(self, trained: TrainedRun) -> None:
        """Raise CheckpointError unless a canonical checkpoint on this machine has all its files in
        full size. Tensors and remote checkpoints are verified when they are read."""
        from pipeline.checkpoint import Formats, Reading
        from stages.formats.formats import Canonical

        if "://" in trained.checkpoint:
            return
        folder = Path(trained.checkpoint)
        form = Formats.installed().detect(folder)
        if isinstance(form, Canonical):
            form.open(folder, Reading()).close()


@dataclass(frozen=True, kw_only=True)
class FinishedTraining:
    """Take an existing checkpoint of any format, to consolidate and export it. `pipe export` writes
    recipes with this stage."""

    nothing_to_plan: ClassVar[bool] = True
    checkpoint: str
    """The checkpoint's folder, or its address (`s3://bucket/run/step-00000100`)."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from address_problems("checkpoint", self.checkpoint)
        if "://" not in self.checkpoint and not expanded(self.checkpoint).is_dir():
            yield Problem(key="checkpoint", message=f"no such folder: {self.checkpoint}")

    def run(self, ctx: Context) -> TrainedRun:
        from pipeline.checkpoint import Reading, open_state

        address = self.checkpoint
        if "://" not in address:
            address = str(expanded(address).absolute())
        reading = Reading(weights_only=True, verify=False)
        with contextlib.closing(open_state(address, reading)) as state:
            progress = Progress.from_record(state.progress, address)
        return TrainedRun(checkpoint=address, progress=progress)
