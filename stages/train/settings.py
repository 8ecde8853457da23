"""Fields of train stages: batches, anomalous steps, early stopping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from pipeline import Data, PlanView, Problem, traits
from stages.batches.settings import Count

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
    kept in the checkpoint's progress (`left_out`) and recorded in `metrics.jsonl`.
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

    def without_rollback(self) -> Anomalies:
        """The same policy with `skip` in place of `rollback`."""
        non_finite: Action = "skip" if self.non_finite == "rollback" else self.non_finite
        spike: Action | None = "skip" if self.spike == "rollback" else self.spike
        return replace(self, non_finite=non_finite, spike=spike)

    def problems(self, saving: Any | None) -> Iterator[Problem]:
        """Mistakes next to the checkpoint stage `saving`; keys are relative to the block."""
        every = saving.every if isinstance(saving, traits.SavesEvery) else None
        if self.rolls_back and saving is not None and every is None:
            yield Problem(
                key="non_finite" if self.non_finite == "rollback" else "spike",
                message="rollback goes back to the newest checkpoint, and none is saved before "
                "the end",
                hint="set every in the checkpoint slot",
            )


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


def generation_problems(
    generate: Generation | None, stage: Any, plan: PlanView
) -> Iterator[Problem]:
    """Problems of texts that the model which `stage` trains cannot write, by its config and files
    if these can be read without a network."""
    from stages.model.config_checks import config_of, table_of_positions, tokenizer_problems

    if generate is None:
        return
    without = "leave out `generate.chat`" if generate.chat else None
    for problem in tokenizer_problems(stage, plan, no_template=without):
        yield replace(problem, key="generate")
    positions = table_of_positions(config_of(stage, plan) or {})
    if positions is not None and generate.max_tokens > positions:
        yield Problem(
            key="generate.max_tokens",
            message=f"is {generate.max_tokens}, and the model has {positions} positions",
            hint="leave room for the prompt, too",
        )


def router_loss_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """The problem of a router's loss that the model cannot have, or asks for in vain, by its config
    if that can be read without a network."""
    from stages.model.config_checks import config_of, has_experts

    weight, config = stage.router_loss, config_of(stage, plan)
    if config is None:
        return
    if weight is None and config.get("output_router_logits") is True:
        yield Problem(
            key="router_loss",
            message="the model's config asks for the loss of its router (output_router_logits)",
            hint="router_loss: config adds it, 0 says that it is left out",
            warning=True,
        )
    if weight is not None and not has_experts(config):
        message = "the model has no experts"
        yield Problem(key="router_loss", message=message, hint="leave out router_loss")
