"""Cross-entropy of a vocabulary that ranks divide is torch's, whole and in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pipeline.distributed.process_group import DistContext
from stages.collectives import sum_gradients
from stages.objectives.chunked import chunked_cross_entropy
from stages.objectives.vocabulary import sharded_cross_entropy
from tests.support.processes import run_ranks

TOKENS, WIDTH = 23, 8
CHUNKS = (None, 1, 5, 64)
VOCABULARIES = (32, 33, 5, 3)
"""Some do not divide, and one leaves a rank without a row on four."""


EXCLUDED = slice(None, None, 8)
"""Ids that the head of `EXCLUDING` never predicts; on 2 and 4 ranks the first of each part."""
EXCLUDING = 32


def values(vocabulary: int, dtype: torch.dtype, *, excludes: bool = False) -> list[torch.Tensor]:
    """Return hidden states, weight and bias of a head, with large logits among them; with
    `excludes` those of some ids are -inf."""
    draw = torch.Generator().manual_seed(vocabulary)
    shapes = [(TOKENS, WIDTH), (vocabulary, WIDTH), (vocabulary,)]
    hidden, weight, bias = (torch.randn(shape, generator=draw) for shape in shapes)
    if excludes:
        bias[EXCLUDED] = -torch.inf
    return [hidden.to(dtype), (weight * 20).to(dtype), bias.to(dtype)]


def labels_of(vocabulary: int, *, excludes: bool = False) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, vocabulary, (TOKENS,), generator=draw)
    labels[::4] = -100
    labels[-1] = vocabulary - 1
    if excludes:
        labels[(labels >= 0) & (labels % EXCLUDED.step == 0)] += 1
    return labels


def shard(value: torch.Tensor, mesh: Any) -> Any:
    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).detach().requires_grad_()


def compared(
    mesh: Any, vocabulary: int, dtype: torch.dtype, chunk: int | None, labels: torch.Tensor, *,
    excludes: bool = False,
) -> list[float]:  # fmt: skip
    """Return the loss, torch's, and the largest relative difference of a gradient."""
    given = values(vocabulary, dtype, excludes=excludes)
    plain = [one.clone().requires_grad_() for one in given]
    expected = F.cross_entropy(F.linear(*plain).float(), labels, reduction="sum")
    (expected * 0.5).backward()
    hidden, weight, bias = given[0].clone().requires_grad_(), *(shard(x, mesh) for x in given[1:])
    if chunk is None:
        summed = sum_gradients(hidden, mesh.get_group())
        local = F.linear(summed, weight.to_local(), bias.to_local())
        shape = torch.Size((TOKENS, vocabulary))
        logits = DTensor.from_local(
            local, mesh, [Shard(-1)], run_check=False, shape=shape, stride=(vocabulary, 1)
        )
        loss = sharded_cross_entropy(logits, labels)
    else:
        loss = chunked_cross_entropy(hidden, weight, bias, labels, chunk)
    (loss * 0.5).backward()
    found = [hidden.grad, weight.grad.full_tensor(), bias.grad.full_tensor()]
    furthest = max(
        float((a.float() - b.grad.float()).abs().max() / (b.grad.float().abs().max() + 1e-9))  # type: ignore[union-attr]
        for a, b in zip(found, plain, strict=True)
    )
    return [float(loss.detach()), float(expected.detach()), furthest]


def every(dist: DistContext) -> list[Any]:
    """Compare each vocabulary, and one with excluded ids, in each number of chunks, in fp32, then
    bf16, then no targets."""
    mesh = init_device_mesh("cpu", (dist.world_size,))
    fp32 = [
        compared(mesh, vocabulary, torch.float32, chunk, labels_of(vocabulary))
        for vocabulary in VOCABULARIES
        for chunk in CHUNKS
    ]
    bf16 = [compared(mesh, 33, torch.bfloat16, chunk, labels_of(33)) for chunk in (None, 5)]
    nothing = torch.full((TOKENS,), -100)
    none = [compared(mesh, 33, torch.float32, chunk, nothing) for chunk in (None, 5)]
    labels = labels_of(EXCLUDING, excludes=True)
    fp32 += [
        compared(mesh, EXCLUDING, torch.float32, chunk, labels, excludes=True) for chunk in CHUNKS
    ]
    return [fp32, bf16, none]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_divided_vocabulary_has_the_loss_and_gradients_of_the_whole(ranks: int) -> None:
    results = run_ranks(every, ranks)
    losses = [[loss for part in result for loss, _, _ in part] for result in results]
    assert all(own == losses[0] for own in losses), "the same bits on every rank"
    fp32, bf16, none = results[0]
    assert len(fp32) == (len(VOCABULARIES) + 1) * len(CHUNKS)
    for loss, expected, furthest in fp32:
        assert loss == pytest.approx(expected, rel=1e-6)
        assert furthest < 1e-5
    for loss, expected, furthest in bf16:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert furthest < 2e-2
    assert none == [[0.0, 0.0, 0.0]] * 2
