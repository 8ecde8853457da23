"""Scores of tokens are those of torch's log_softmax, whoever has which part of the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pipeline.distributed.process_group import DistContext
from stages.collectives import sum_gradients
from stages.objectives.chunked import chunked_scores
from stages.objectives.logits import ScoreColumns, VocabularyShard, whole_vocabulary
from tests.stages.objectives.test_logits import (
    CHUNKS,
    EXCLUDING,
    TOKENS,
    VOCABULARIES,
    labels_of,
    shard,
    values,
)
from tests.support.processes import run_ranks

ASKED = [
    ScoreColumns(tokens=True, entropy=False, candidates=0),
    ScoreColumns(tokens=False, entropy=True, candidates=0),
    ScoreColumns(tokens=False, entropy=False, candidates=3),
    ScoreColumns(tokens=True, entropy=True, candidates=2),
]


def ids_of(vocabulary: int, count: int) -> torch.Tensor | None:
    """Return different ids for each token, shape (tokens, count)."""
    draw = torch.Generator().manual_seed(2)
    order = torch.rand(TOKENS, vocabulary, generator=draw).argsort(-1)
    return order[:, :count] if count else None


def plain(
    asked: ScoreColumns, logits: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor | None
) -> torch.Tensor:
    """Compute the same from torch's log_softmax."""
    log_probs, columns = F.log_softmax(logits.double(), -1), []
    if asked.tokens:
        columns.append(log_probs.gather(-1, labels.clamp(min=0)[:, None]))
    if asked.entropy:
        columns.append(-(log_probs.exp() * log_probs).sum(-1, keepdim=True))
    if ids is not None:
        others = log_probs.scatter(-1, ids, -torch.inf)
        columns += [log_probs.gather(-1, ids), others.logsumexp(-1, keepdim=True)]
    return torch.where((labels != -100)[:, None], torch.cat(columns, -1), 0.0)


def compared(
    mesh: Any, vocabulary: int, asked: ScoreColumns, chunk: int | None, *, excludes: bool = False
) -> list[float]:
    """Return the largest differences of scores, and of gradients relative to the largest."""
    # Softer than the other test's: the mass of all others must not vanish.
    hard = values(vocabulary, torch.float32, excludes=excludes)
    given = [one * scale for one, scale in zip(hard, (1, 0.02, 0.5), strict=True)]
    labels = labels_of(vocabulary, excludes=excludes)
    ids = ids_of(vocabulary, asked.candidates)
    known = [one.clone().requires_grad_() for one in given]
    expected = plain(asked, F.linear(*known), labels, ids)
    draw = torch.Generator().manual_seed(3)
    upstream = torch.randn(expected.shape, generator=draw)
    expected.backward(upstream.double())
    hidden, weight, bias = given[0].clone().requires_grad_(), *(shard(x, mesh) for x in given[1:])
    if chunk is None:
        group = mesh.get_group()
        local = F.linear(sum_gradients(hidden, group), weight.to_local(), bias.to_local())
        shape, stride = torch.Size((TOKENS, vocabulary)), (vocabulary, 1)
        logits = DTensor.from_local(
            local, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride
        )
        found = asked(logits.to_local(), labels, ids, VocabularyShard.find(logits))
        whole = whole_vocabulary(local.detach(), VocabularyShard.find(logits))
        torch.testing.assert_close(whole, F.linear(*given))
    else:
        found = chunked_scores(hidden, weight, bias, labels, ids, chunk, asked)
        with torch.no_grad():
            again = chunked_scores(hidden, weight, bias, labels, ids, chunk, asked)
        torch.testing.assert_close(again, found.detach(), rtol=0, atol=2e-6)
    found.backward(upstream)
    grads = [hidden.grad, weight.grad.full_tensor(), bias.grad.full_tensor()]
    furthest = max(
        float((a - b.grad).abs().max() / (b.grad.abs().max() + 1e-9))  # type: ignore[union-attr]
        for a, b in zip(grads, known, strict=True)
    )
    return [float((found - expected).detach().abs().max()), furthest]


def every(dist: DistContext) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (dist.world_size,))
    return [
        compared(mesh, vocabulary, asked, chunk)
        for vocabulary in VOCABULARIES
        for asked in ASKED
        if asked.candidates < vocabulary
        for chunk in CHUNKS
    ] + [compared(mesh, EXCLUDING, ASKED[0], chunk, excludes=True) for chunk in CHUNKS]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_scores_and_gradients_are_torchs(ranks: int) -> None:
    for found in run_ranks(every, ranks):
        assert len(found) == 16 * 4
        assert max(scores for scores, _ in found) < 2e-6
        assert max(gradients for _, gradients in found) < 1e-5


def test_excluded_ids_have_no_share_of_the_entropy() -> None:
    asked = ScoreColumns(tokens=False, entropy=True, candidates=0)
    logits = torch.tensor([[1.0, -torch.inf, 2.0]], requires_grad=True)
    found = asked(logits, torch.tensor([0]), None, None)
    found.sum().backward()
    without = torch.tensor([[1.0, 2.0]], requires_grad=True)
    expected = asked(without, torch.tensor([0]), None, None)
    expected.sum().backward()
    assert found.tolist() == expected.tolist()
    assert logits.grad is not None
    assert without.grad is not None
    assert logits.grad[:, [0, 2]].tolist() == without.grad.tolist()
    assert logits.grad[0, 1] == 0


def test_the_mass_of_all_others_may_vanish() -> None:
    asked = ScoreColumns(tokens=False, entropy=False, candidates=1)
    logits = torch.tensor([[60.0, 0.0, 0.0]], requires_grad=True)
    found = asked(logits, torch.tensor([0]), torch.tensor([[0]]), None)
    found.sum().backward()
    assert found.tolist() == [[0.0, pytest.approx(math.log(2) - 60)]]
    assert bool(logits.grad.isfinite().all())  # type: ignore[union-attr]
