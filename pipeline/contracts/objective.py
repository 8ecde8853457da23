"""The function that is minimised: engines score tokens, an objective judges the scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, Protocol

from pipeline.errors import StageError

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.contracts.data import MicroBatch

Unit = Literal["targets", "rows", "groups"]
"""Count that a sum is divided by: target tokens; rows (documents); groups of rows such as pairs
(`Data.group`). Every rank knows it for a whole step without communication."""


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Names the scores to compute, as in `Scores`, and limits the memory for them."""

    total: bool = False
    tokens: bool = False
    entropy: bool = False
    candidates: str = ""
    """Name of the per-token column with the ids whose log-probabilities are asked for, if any."""
    values: bool = False
    logits: bool = False
    router: float | Literal["config"] | None = None
    """Weight of the router's loss, or `config` for the model's own; None: it is not computed."""
    chunk: int | None = None
    """Tokens whose logits are in memory at a time; None: all of a micro-batch's."""
    compiled_by: str | None = None
    """Backend of torch.compile for the loss in chunks; None: it is not compiled."""


class Scores(SimpleNamespace):
    """The scores of a micro-batch that were asked for, in fp32 and differentiable: complete,
    whatever divides the model or the sequence, and the same on all ranks that share the
    micro-batch. A token without target has the score 0."""

    total: Tensor
    """Sum of all labels' log-probabilities in nats; a scalar. The quickest one to compute."""
    tokens: Tensor
    """Log-probability of each label in nats; shape (lines, length)."""
    entropy: Tensor
    """Entropy in nats of the prediction at each target; shape (lines, length)."""
    candidates: Tensor
    """Log-probability of k ids, then of all others together; shape (lines, length, k + 1)."""
    values: Tensor
    """Output of a head that is not over the vocabulary; shape (lines, length, outputs)."""
    logits: Tensor
    """Logits of the token after each row; shape (rows, vocabulary)."""
    router: Tensor
    """Weighted loss of a mixture of experts' router, a mean over the micro-batch's tokens; a
    scalar. Not computed where ranks divide sequences or layers."""

    def __getattr__(self, name: str) -> Tensor:
        raise StageError(f"an objective uses scores.{name}, which its request does not ask for")


@dataclass(frozen=True, kw_only=True)
class LossParts:
    """Sums over the rows of a micro-batch; scalars in fp32."""

    terms: Mapping[Unit, Tensor]
    """Sum of the loss in each unit, which the engine divides by the step's count of it."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums for metrics."""


class Objective(Protocol):
    """The function that is minimised. It sees whole rows, and never a micro-batch without rows."""

    request: ScoreRequest
    units: Sequence[Unit]
    """Units of the loss's terms."""
    metrics: Mapping[str, Unit]
    """Name of each sum for metrics -> the unit that it is divided by."""

    def __call__(self, scores: Scores, batch: MicroBatch) -> LossParts:
        """Judge a micro-batch. Every rank that shares it computes the same."""


class Measure(Protocol):
    """A function of each row, without gradients: a held-out loss, a reference's score."""

    request: ScoreRequest
    width: int
    """Numbers for each row."""

    def __call__(self, scores: Scores, batch: MicroBatch) -> Tensor:
        """Measure each row; shape (rows, width)."""


class Scorer(Protocol):
    """Runs one model to scores."""

    def __call__(
        self, own: MicroBatch, whole: MicroBatch, request: ScoreRequest, **inputs: Tensor
    ) -> Scores:
        """Run the model on `own`, this rank's slice of the sequences of `whole`, or all of it.
        `inputs` are its arguments instead of the token ids. Raises StageError for scores that the
        model does not have."""
