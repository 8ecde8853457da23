"""Fields of train stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from pipeline import (
    Checkpoints,
    Data,
    Measure,
    ModelSource,
    Objective,
    PlanView,
    Problem,
    TrainingLength,
    UpdateRule,
    traits,
)
from stages.fields import BatchPlan, Count, Period

Action = Literal["stop", "skip", "rollback"]
NO_SAMPLES = "needs held-out samples, and there are none"
GIVE_SAMPLES = "give some in the data slot (heldout_fraction or heldout_files)"


def heldout_problems(stage: Any, plan: PlanView, keys: Iterable[str]) -> Iterator[Problem]:
    """Problems of a train stage's fields that need held-out samples, if its data give none."""
    data = plan.producer(stage, Data)
    if isinstance(data, traits.HoldsOut) and not data.holds_out:
        for key in keys:
            yield Problem(key=key, message=NO_SAMPLES, hint=GIVE_SAMPLES)


@dataclass(frozen=True, kw_only=True)
class Anomalies:
    """Reaction to a step whose gradient is not finite, or whose loss spikes.

    `stop` ends the run; nothing of the step is saved. `skip` drops the update: weights, optimizer
    state and the schedule stay where they are, and the next batch takes the step's place.
    `rollback` restores the newest checkpoint and continues with the batch after the anomalous one
    (as in Chowdhery et al. 2022, PaLM, section 5.1). Positions of batches without an update are
    kept in the checkpoint's progress (`left_out`; its `skipped` counts overflows) and recorded in
    `metrics.jsonl`.
    """

    non_finite: Action = "stop"
    """Reaction to a gradient norm that is infinite or not a number. An overflow that loss scaling
    handles does not count."""
    spike: Action | None = None
    """Reaction to a loss spike; null does not look for them. Looking sums the loss over ranks
    before each update."""
    spike_window: Annotated[int, Ge(2), Le(10_000)] = 100
    """Newest steps whose losses make up the running mean. Spikes are looked for once there were
    that many."""
    spike_factor: Annotated[float, Gt(1)] = 2.0
    """A loss above the running mean times this is a spike."""
    max_skips: Count = 5
    """Anomalous steps to skip in a row; the run stops at one more."""
    max_rollbacks: Count = 3
    """Rollbacks in the whole training; the run stops at one more."""

    @property
    def rolls_back(self) -> bool:
        """Whether training may go back to a checkpoint."""
        return "rollback" in (self.non_finite, self.spike)


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """End training when the held-out loss stops falling."""

    patience: Count
    """Evaluations in a row without an improvement after which training ends."""
    min_improvement: Annotated[float, Ge(0)] = 0.0
    """Least difference in nats to the last improvement; with 0 any lower loss is an improvement."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Texts that the model writes while it trains, as it would after training.

    A token costs a forward pass of the text so far. Changes nothing in the training.
    """

    prompts: Annotated[tuple[str, ...], MinLen(1), MaxLen(64)]
    """Texts to be continued."""
    every: Count | None = None
    """Steps between two times; the last step has one too. Null writes at the end only."""
    first: bool = False
    """Write before the first step too, so that the texts before and after training can be
    compared."""
    max_tokens: Annotated[int, Gt(0), Le(1024)] = 64
    """Most tokens of a text."""
    temperature: Annotated[float, Ge(0)] = 0.0
    """Logits are divided by this before a token is drawn; 0 takes the most probable one."""
    chat: bool = False
    """Put each prompt as a user's message into the tokenizer's chat template."""


@dataclass(frozen=True, kw_only=True)
class CausalLmFields(BatchPlan):
    """The settings of a training, its length and its loss."""

    workers: Annotated[int, Ge(0)] = 1
    """Threads that prepare micro-batches ahead: at most `workers + 1` are ready or in work, the
    next step's included; 0 prepares each just before its use. Changes no sample and no order."""
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

    @property
    def fields_needing_heldout(self) -> list[str]:
        """The fields that ask for held-out samples."""
        names = ("eval_every", "eval_first", "early_stopping")
        return [n for n in names if getattr(self, n)] + ["result"] * (self.result == "best")

    def length(self, samples: int | None = None) -> TrainingLength:
        """Length of the training; with epochs, its steps are known if `samples` are. Planned;
        `Feed.total_steps` follows what was skipped."""
        steps, batch = self.steps, self.global_batch_size
        if self.epochs is not None and samples is not None:
            steps = -(-round(self.epochs * samples) // batch)
        return TrainingLength(
            steps=steps,
            epoch=None if samples is None else Fraction(samples, batch),
            eval_every=self.eval_every,
            eval_first=self.eval_first,
            saves_first=self.anomalies.rolls_back,
        )

    def length_on(self, data: Data, checkpoints: Checkpoints) -> TrainingLength:
        """Length of the training on these samples. They are counted only where something depends
        on their number, which a stream does not know."""
        counts = isinstance(self.eval_every, str) or checkpoints.counts_epochs
        return self.length(len(data.train) if counts or self.epochs is not None else None)

    def objective(self, model: ModelSource) -> Objective:
        """Return the function to minimise. A stage that inherits from this one may have another."""
        from stages.objectives.cross_entropy import CrossEntropy

        by, router = model.compiled_by, self.router_loss
        return CrossEntropy(self.loss_chunk_size, compiled_by=by, router=router)

    def measure(self, model: ModelSource) -> Measure:
        """The held-out loss of each row: a sum over target tokens."""
        from stages.objectives.cross_entropy import RowLoss

        return RowLoss(self.loss_chunk_size, compiled_by=model.compiled_by)


@dataclass(frozen=True, kw_only=True)
class TrainerFields(BatchPlan):
    """Batches of a training by transformers' Trainer, its evaluations, checkpoints, arguments."""

    log_every: Count = 10
    """Steps between two lines on screen; the first step has one too, and a step after 30 s without
    any. `metrics.jsonl` has every step."""
    eval_every: Count | None = None
    """Steps between evaluations on held-out samples; null evaluates at the end only."""
    save_every: Count | None = None
    """Steps between checkpoints; null saves at the end only."""
    keep: Count | None = 2
    """Newest checkpoints to keep; null keeps all."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further TrainingArguments, named as in transformers (`activation_checkpointing`,
    `torch_compile`). Arguments that a field above or another slot decides are refused; trackers are
    slots (`track.wandb`)."""


def several_rules(rules: Sequence[UpdateRule]) -> Iterator[tuple[str, str]]:
    """Message and hint where there is more than one rule."""
    if len(rules) > 1:
        named = ", ".join(rule.algorithm for rule in rules)
        message = f"the Trainer takes one optimizer, the optimizer slot asks for {named}"
        yield message, "use train.causal_lm, or another optimizer"
