"""Scores of single tokens from their logits, differentiable, wherever the vocabulary lies."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline import NO_TARGET, MicroBatch, ScoreRequest
from stages.collectives import all_reduce, sum_gradients
from stages.objectives.vocabulary import VocabularyShard


class ScoreColumns(NamedTuple):
    """Which scores of each token are asked for, and their computation as columns of one tensor."""

    tokens: bool
    entropy: bool
    candidates: int
    """Number of ids whose log-probabilities are asked for."""

    @classmethod
    def asked(cls, request: ScoreRequest, batch: MicroBatch) -> ScoreColumns:
        """The columns that a request asks for."""
        name = request.candidates
        count = batch.tokens[name].shape[-1] if name else 0
        others = request.entropy or count > 0
        # The total is then summed from tokens: one pass.
        return cls(request.tokens or (request.total and others), request.entropy, count)

    def __bool__(self) -> bool:
        return self.tokens or self.entropy or self.candidates > 0

    def named(self, columns: Tensor) -> dict[str, Tensor]:
        """Columns, shape (..., columns), by the names that `Scores` has for them."""
        found, rest = dict[str, Tensor](), columns
        if self.tokens:
            found["tokens"], rest = rest[..., 0], rest[..., 1:]
        if self.entropy:
            found["entropy"], rest = rest[..., 0], rest[..., 1:]
        if self.candidates:
            found["candidates"] = rest
        return found

    def __call__(
        self, logits: Tensor, labels: Tensor, candidates: Tensor | None,
        shard: VocabularyShard | None,
    ) -> Tensor:  # fmt: skip
        """The scores of tokens, fp32, shape (tokens, columns); 0 for tokens without target.

        `logits` (tokens, vocabulary), whole or this rank's `shard`; `labels` (tokens,) and
        `candidates` (tokens, k) of int64. Collective with a shard, and the same on its ranks."""
        wide, trained = logits.float(), labels != NO_TARGET
        vocabulary = _Vocabulary(wide, shard)
        normaliser = vocabulary.normaliser()
        columns = []
        if self.tokens:
            target_logit = vocabulary.at(labels.clamp(min=0)[:, None])
            columns.append(target_logit - normaliser)
        if self.entropy:
            # An id whose logit is -inf adds 0, not 0 times -inf.
            least = torch.finfo(torch.float32).min
            # Each rank uses it for its own part of the vocabulary.
            shared = normaliser if shard is None else sum_gradients(normaliser, shard.group)
            log_shares = (wide - shared).clamp(min=least)
            columns.append(-vocabulary.sum(log_shares.exp() * log_shares))
        if candidates is not None:
            # Not 1 less the candidates' mass, which cancels where they have nearly all of it.
            asked = torch.zeros_like(wide, dtype=torch.bool)
            if shard is None:
                asked.scatter_(-1, candidates, True)
            elif shard.size:
                asked.scatter_reduce_(-1, *shard.columns(candidates), "amax")
            others = vocabulary._replace(logits=wide.masked_fill(asked, -torch.inf))
            columns += [vocabulary.at(candidates) - normaliser, others.normaliser() - normaliser]
        return torch.where(trained[:, None], torch.cat(columns, dim=-1), 0.0)


OF_LABELS = ScoreColumns(tokens=True, entropy=False, candidates=0)


class _Vocabulary(NamedTuple):
    """Logits (tokens, vocabulary) of fp32, all or a shard of them."""

    logits: Tensor
    shard: VocabularyShard | None

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the whole vocabulary; shape (tokens, 1)."""
        part = values.sum(-1, keepdim=True)
        return part if self.shard is None else all_reduce(part, self.shard.group)

    def normaliser(self) -> Tensor:
        """log sum exp of each token's logits; shape (tokens, 1)."""
        if self.shard is None:
            return self.logits.logsumexp(-1, keepdim=True)
        with torch.no_grad():
            largest = self.shard.largest(self.logits)[:, None]
        return largest + self.sum((self.logits - largest).exp()).log()

    def at(self, ids: Tensor) -> Tensor:
        """The logits of `ids`, shape (tokens, k)."""
        if self.shard is None:
            return self.logits.gather(-1, ids)
        columns, here = self.shard.columns(ids)
        if not self.shard.size:
            part = torch.zeros_like(ids, dtype=self.logits.dtype)
        else:
            part = torch.where(here, self.logits.gather(-1, columns), 0.0)
        # An id that no rank has is an error of an index elsewhere.
        known = (ids >= 0) & (ids < self.shard.whole)
        return all_reduce(part, self.shard.group).masked_fill(~known, torch.nan)


def whole_vocabulary(logits: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Logits (..., vocabulary) of fp32 from a shard's (collective)."""
    if shard is None:
        return logits.float()
    ends = shard.first, shard.whole - shard.first - shard.size
    return all_reduce(F.pad(logits.float(), ends), shard.group)
