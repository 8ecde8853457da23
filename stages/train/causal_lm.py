"""Training a causal language model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from pipeline.contracts.data import Data
from pipeline.contracts.engine import Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.stage import Context, PlanView, ResourceNeed, Trial
from pipeline.contracts.training import Checkpoints, TrainedRun, TrainingLength
from pipeline.errors import Problem
from stages.train.policies import GIVE_SAMPLES, NO_SAMPLES, Anomalies, Count, EarlyStopping


@dataclass(frozen=True, kw_only=True)
class TrainCausalLm:
    """Train on next-token prediction; the same samples in the same order under every strategy."""

    global_batch_size: Count
    """Samples in one optimizer step, over all ranks and micro-batches."""

    steps: Count | None = None
    """Optimizer steps to train for. Exactly one of `steps` and `epochs`."""

    epochs: Annotated[float, Gt(0)] | None = None
    """Passes over the training samples, may be a fraction. Exactly one of `steps` and `epochs`."""

    micro_batch_size: Count | None = None
    """Samples of one forward pass on one rank; null derives it from `accumulation`."""

    accumulation: Count | None = None
    """Micro-batches of one step on one rank; null derives it from `micro_batch_size`, or is 1.
    Where the samples do not divide evenly, fewer can be enough."""

    shuffle: bool = True
    """Shuffle anew every epoch, by the recipe's seed; false trains in file order."""

    workers: Annotated[int, Ge(0)] = 0
    """Threads that prepare the next step's micro-batches while this one is trained on; 0 prepares
    each when it is its turn. Changes no sample and no order."""

    loss_chunk_size: Count | None = None
    """Tokens whose logits are in memory at a time, for large vocabularies; null computes those of
    a whole micro-batch at once. Changes no number but rounding."""

    log_every: Count = 10
    """Steps between two lines on screen. `metrics.jsonl` has every step."""

    eval_every: Count | None = None
    """Steps between evaluations on held-out samples; null evaluates at the end only."""

    eval_first: bool = False
    """Evaluate before the first step too."""

    eval_last: bool = True
    """Evaluate after the last step."""

    early_stopping: EarlyStopping | None = None
    """End training when the held-out loss stops to fall; null trains to the last step."""

    result: Literal["last", "best"] = "last"
    """Which checkpoint later stages (consolidate, export) take: that of the last step, or the one
    with the lowest held-out loss, which needs `keep_best` in the checkpoint slot."""

    anomalies: Anomalies = field(default_factory=Anomalies)
    """What to do about steps whose gradient is not finite or whose loss spikes."""

    profile_steps: tuple[Count, ...] = ()
    """Steps to record with torch.profiler. Each rank leaves a trace for Perfetto in `profile/` in
    the run folder; `metrics.jsonl` tells the step's share of communication."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if (self.steps is None) == (self.epochs is None):
            yield Problem(key="steps", message="give exactly one of steps and epochs")
        if self.micro_batch_size is not None and self.accumulation is not None:
            given = self.micro_batch_size * self.accumulation * plan.procs
            if given != self.global_batch_size:
                yield Problem(
                    key="global_batch_size",
                    message=f"is {self.global_batch_size}, but micro_batch_size x accumulation x "
                    f"processes = {self.micro_batch_size} x {self.accumulation} x {plan.procs} "
                    f"= {given}",
                    hint="leave out one of micro_batch_size and accumulation",
                )
        for problem in self.anomalies.problems(plan):
            yield replace(problem, key=f"anomalies.{problem.key}")
        yield from self._evaluation_problems(plan)

    def _evaluation_problems(self, plan: PlanView) -> Iterator[Problem]:
        kept = [getattr(stage, "keep_best", 0) for stage in plan.giving(Checkpoints)]
        if self.early_stopping is not None and self.eval_every is None:
            yield Problem(
                key="early_stopping",
                message="stops by evaluations, and there is none before the end",
                hint="set eval_every",
            )
        if self.eval_every is None and any(kept):
            yield Problem(
                key="eval_every",
                message="the checkpoint slot's keep_best compares evaluations, and there is only "
                "one, at the end",
                hint="set eval_every",
            )
        if self.result == "best" and not all(kept):
            yield Problem(
                key="result",
                message="the checkpoint slot does not keep the best checkpoint",
                hint="set keep_best: 1 there",
            )
        samples = [getattr(stage, "holds_out", True) for stage in plan.giving(Data)]
        if samples and not any(samples):
            for key in self.evaluates:
                yield Problem(key=key, message=NO_SAMPLES, hint=GIVE_SAMPLES)

    @property
    def evaluates(self) -> list[str]:
        """The fields that ask for held-out samples."""
        best = self.result == "best"
        asked = {name: getattr(self, name) for name in ("eval_every", "eval_first")}
        asked |= {"early_stopping": self.early_stopping, "result": best}
        return [name for name, value in asked.items() if value]

    def for_benchmark(self, trial: Trial) -> TrainCausalLm:
        """Of a trial's steps on its global batch, without any evaluation. The micro-batch stays, or
        is what it would be on the trial's `procs`; accumulation follows from it."""
        return replace(
            self,
            steps=trial.steps,
            epochs=None,
            global_batch_size=trial.grown(self.global_batch_size),
            micro_batch_size=self.microbatch_size(trial.procs),
            accumulation=None,
            eval_every=None,
            eval_first=False,
            eval_last=False,
            early_stopping=None,
            result="last",
            anomalies=self.anomalies.without_rollback(),
            profile_steps=trial.profile,
        )

    def microbatch_size(self, ranks: int) -> int:
        """Samples of one forward pass, given or derived, on `ranks` data-parallel ranks."""
        if self.micro_batch_size is not None:
            return self.micro_batch_size
        return -(-self.global_batch_size // (ranks * (self.accumulation or 1)))

    def length(self, samples: int | None = None) -> TrainingLength:
        """Of the training; epochs have steps where the number of `samples` is known."""
        steps = self.steps
        if self.epochs is not None and samples is not None:
            steps = -(-round(self.epochs * samples) // self.global_batch_size)
        return TrainingLength(
            steps=steps,
            eval_every=self.eval_every,
            eval_first=self.eval_first,
            saves_first=self.anomalies.rolls_back,
        )

    def resource_needs(
        self, ctx: Context, data: Data, checkpoints: Checkpoints
    ) -> Iterator[ResourceNeed]:
        samples = None if self.epochs is None else len(data.train)
        return checkpoints.resource_needs(self.length(samples))

    def run(
        self,
        ctx: Context,
        engine: Engine,
        data: Data,
        optimizer: OptimizerPlan,
        checkpoints: Checkpoints,
        model: ModelSource,
    ) -> TrainedRun:
        from stages.train.lineage import lineage
        from stages.train.loop import train

        began = lineage(self, ctx, data, model)
        return train(self, ctx, engine, data, optimizer, checkpoints, began)

    def verify_result(self, trained: TrainedRun) -> None:
        """A canonical checkpoint has all its files, each of its size; its tensors are verified when
        they are read, and so is all of what is not on this machine. Raises CheckpointError."""
        from pipeline.checkpoint.formats import Formats, Reading
        from stages.formats.canonical import Canonical

        if "://" in trained.checkpoint:
            return
        folder = Path(trained.checkpoint)
        form = Formats.installed().detect(folder)
        if isinstance(form, Canonical):
            form.open(folder, Reading()).close()
