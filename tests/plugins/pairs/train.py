"""Training on pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from pipeline import ModelSource, Objective
from stages.train import TrainCausalLm


@dataclass(frozen=True, kw_only=True)
class TrainPairs(TrainCausalLm):
    """Prefer the first row of each pair (Rafailov et al. 2023, eq. 7), next to its likelihood."""

    beta: Annotated[float, Gt(0)] = 0.1
    """Factor of the difference of log-probabilities."""

    likelihood: Annotated[float, Ge(0)] = 0.5
    """Weight of the first row's weighted cross-entropy, a mean over all target tokens."""

    def objective(self, model: ModelSource) -> Objective:
        from tests.plugins.pairs.objective import PairLoss

        return PairLoss(self.beta, self.likelihood, self.loss_chunk_size)
