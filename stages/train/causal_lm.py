"""Training of a causal language model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from pipeline import (
    Checkpoints,
    Context,
    Data,
    Engine,
    Measure,
    ModelSource,
    Objective,
    OptimizerPlan,
    PlanView,
    Problem,
    ResourceNeed,
    StepCallback,
    TrainedRun,
    TrainingLength,
    traits,
)
from stages.batches.settings import BatchPlan, Count
from stages.fields import Period, epoch_problems
from stages.train.settings import (
    Anomalies,
    EarlyStopping,
    Generation,
    generation_problems,
    heldout_problems,
    router_loss_problems,
)
from stages.wires import mixed_problems


@dataclass(frozen=True, kw_only=True)
class TrainCausalLm(BatchPlan):
    """Train on next-token prediction; the same samples in the same order under every strategy."""

    workers: Annotated[int, Ge(0)] = 1
    """Threads that prepare the next micro-batches while the device computes, one more than there
    are threads, also of the next step; 0 prepares each just before its use. Changes no sample and
    no order."""

    loss_chunk_size: Count | None = None
    """Tokens whose logits are in memory at a time, for large vocabularies; null computes all logits
    of a micro-batch at once. Changes rounding only."""

    router_loss: Annotated[float, Ge(0)] | Literal["config"] | None = None
    """Weight of the loss by which a mixture of experts keeps its router balanced, added to the mean
    cross-entropy: a number, or the `router_aux_loss_coef` of the model's config. Null trains on
    cross-entropy only, whatever the config says. Held-out losses are without it."""

    log_every: Count = 10
    """Steps between two lines on screen; the first step has one too, and a step after 30 s without
    any. `metrics.jsonl` has every step."""

    eval_every: Period | None = None
    """Steps between evaluations on held-out samples, or a part of an epoch: `0.25 epochs`,
    `1/3 epochs`. A part of an epoch ends with the step that completes it. Null evaluates only
    at the end."""

    eval_first: bool = False
    """Evaluate before the first step too."""

    eval_last: bool = True
    """Evaluate after the last step."""

    early_stopping: EarlyStopping | None = None
    """End training when the held-out loss stops falling; null trains to the last step."""

    result: Literal["last", "best"] = "last"
    """The checkpoint that later stages (consolidate, export) take: of the last step, or with the
    lowest held-out loss, which needs `keep_best` in the checkpoint slot."""

    anomalies: Anomalies = field(default_factory=Anomalies)
    """Reaction to steps whose gradient is not finite or whose loss spikes."""

    generate: Generation | None = None
    """Texts to be generated now and then: on screen, in `metrics.jsonl`, in the report and in
    trackers."""

    profile_steps: tuple[Count, ...] = ()
    """Steps to record with torch.profiler. Each rank writes a trace for Perfetto to `profile/` in
    the run folder; `metrics.jsonl` has the step's share of communication."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        for problem in self.anomalies.problems(plan.producer(self, Checkpoints)):
            yield replace(problem, key=f"anomalies.{problem.key}")
        yield from self._evaluation_problems(plan)
        yield from epoch_problems([self], plan, eval_every=self.eval_every)
        yield from router_loss_problems(self, plan)
        yield from generation_problems(self.generate, self, plan)
        yield from mixed_problems(self, plan)

    def _evaluation_problems(self, plan: PlanView) -> Iterator[Problem]:
        saving = plan.producer(self, Checkpoints)
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
        yield from heldout_problems(self, plan, self.evaluates)

    @property
    def evaluates(self) -> list[str]:
        """The fields that ask for held-out samples."""
        asked = {
            "eval_every": self.eval_every,
            "eval_first": self.eval_first,
            "early_stopping": self.early_stopping,
            "result": self.result == "best",
        }
        return [name for name, value in asked.items() if value]

    def length(self, samples: int | None = None) -> TrainingLength:
        """Length of the training; with epochs, its steps are known if `samples` are."""
        steps, epoch = self.steps, None
        if samples is not None:
            epoch = Fraction(samples, self.global_batch_size)
        if self.epochs is not None and samples is not None:
            steps = -(-round(self.epochs * samples) // self.global_batch_size)
        return TrainingLength(
            steps=steps,
            epoch=epoch,
            eval_every=self.eval_every,
            eval_first=self.eval_first,
            saves_first=self.anomalies.rolls_back,
        )

    def length_on(self, data: Data, checkpoints: Checkpoints) -> TrainingLength:
        """Length of the training on these samples. They are counted only where something depends
        on their number, which a stream does not know."""
        counts = isinstance(self.eval_every, str) or checkpoints.counts_epochs
        return self.length(len(data.train) if counts or self.epochs is not None else None)

    def resource_needs(
        self, ctx: Context, data: Data, checkpoints: Checkpoints
    ) -> Iterator[ResourceNeed]:
        return checkpoints.resource_needs(self.length_on(data, checkpoints))

    def run(
        self,
        ctx: Context,
        engine: Engine,
        data: Data,
        optimizer: OptimizerPlan,
        checkpoints: Checkpoints,
        model: ModelSource,
        callback: StepCallback | None = None,
    ) -> TrainedRun:
        from stages.train.start import train

        return train(self, ctx, engine, data, optimizer, checkpoints, model, callback)

    def objective(self, model: ModelSource) -> Objective:
        """Return the function to minimise. A stage that inherits from this one may have another."""
        from stages.objectives.cross_entropy import CrossEntropy

        chunk, by, router = self.loss_chunk_size, model.compiled_by, self.router_loss
        return CrossEntropy(chunk, compiled_by=by, router=router)

    def measure(self, model: ModelSource) -> Measure:
        """The held-out loss of each row: a sum over target tokens."""
        from stages.objectives.cross_entropy import RowLoss

        return RowLoss(self.loss_chunk_size, compiled_by=model.compiled_by)

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
