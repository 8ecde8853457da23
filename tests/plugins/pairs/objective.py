"""The loss of pairs: it is no sum over tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pipeline import LossParts, MicroBatch, ScoreRequest, Scores


class PairLoss:
    """Objective: a pair's log-sigmoid, and a cross-entropy with a divisor of its own."""

    units = ("groups", "targets")
    metrics = {"pair_accuracy": "groups", "mean_reference": "rows", "wrong_columns": "rows"}

    def __init__(self, beta: float, likelihood: float, chunk: int | None) -> None:
        self.request = ScoreRequest(tokens=True, chunk=chunk)
        self._beta, self._likelihood = beta, likelihood

    def __call__(self, scores: Scores, batch: MicroBatch) -> LossParts:
        assert batch.size % 2 == 0
        gains = batch.sum_rows(scores.tokens) - batch.rows["reference"]
        better, worse = gains.view(-1, 2).unbind(1)
        weighted = batch.sum_rows(scores.tokens * batch.tokens["weight"]).view(-1, 2)[:, 0]
        return LossParts(
            terms={
                "groups": -F.logsigmoid(self._beta * (better - worse)).sum(),
                "targets": -self._likelihood * weighted.sum(),
            },
            sums={
                "pair_accuracy": (better > worse).float().sum(),
                "mean_reference": batch.rows["reference"].sum(),
                "wrong_columns": wrong_columns(batch),
            },
        )


def wrong_columns(batch: MicroBatch) -> torch.Tensor:
    """Return the number of entries that are not the function of ids and places that they are made
    as, a row's divided by ten."""
    ids, length = batch.input_ids, batch.input_ids.shape[1]
    places = torch.arange(length).expand_as(ids) if batch.positions is None else batch.positions
    real = torch.ones_like(ids, dtype=torch.bool) if batch.real is None else batch.real
    tokens = (batch.tokens["weight"] != 1 + ids % 5 + 0.25 * places) & real
    rows = (batch.rows["reference"] + 0.01 * batch.sum_rows(ids.float())).abs() > 1e-4
    return tokens.sum() + 0.1 * rows.sum()
