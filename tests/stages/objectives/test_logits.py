"""Cross-entropy of logits, whole, in chunks and divided by the vocabulary, is torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pipeline.distributed.process_group import DistContext
from stages.collectives import sum_gradients
from stages.objectives.chunked import chunked_cross_entropy
from stages.objectives.logits import compiled_loss, loss_of_logits, sharded_cross_entropy
from tests.support.processes import run_ranks

VOCABULARY = 50
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def drawn(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits, some of them large, and labels, some of which are no target."""
    draw = torch.Generator().manual_seed(tokens)
    logits = (torch.randn(tokens, VOCABULARY, generator=draw) * 20).to(dtype)
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=draw)
    labels[1::3] = -100
    return logits, labels


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_loss_and_gradient_are_those_of_fp32(way: str, dtype: torch.dtype) -> None:
    of_logits = loss_of_logits if way == "plain" else compiled_loss("aot_eager")
    logits, labels = drawn(33, dtype)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="sum")
    expected.backward()
    alone, nothing = of_logits(logits.clone(), labels, False)
    loss, gradient = of_logits(logits, labels, True)
    assert nothing is None
    assert loss.dtype == torch.float32
    assert torch.equal(alone, loss)
    assert not loss[labels == -100].any()
    assert float(loss.sum()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert gradient is not None
    assert exact.grad is not None
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=0, atol=ROUNDING[dtype])
    assert not gradient[labels == -100].any()


def test_the_gradient_takes_the_memory_of_the_logits() -> None:
    for dtype in ROUNDING:
        logits, labels = drawn(8, dtype)
        _, gradient = loss_of_logits(logits, labels, True)
        assert gradient is logits


def test_the_gradient_of_a_sure_target_is_not_rounded_to_nothing() -> None:
    logits, labels = torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor([0])
    logits[0, 0] = 8.0  # probability 0.99966, which is 1 in bf16
    _, gradient = loss_of_logits(logits, labels, True)
    assert gradient is not None
    assert float(gradient[0, 0]) == pytest.approx(-3.35e-4, rel=0.01)


def test_chunks_of_any_length_share_one_compiled_graph() -> None:
    of_logits = compiled_loss("aot_eager")
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, 8, generator=draw).requires_grad_()
    for tokens in (48, 37, 5, 33):  # of 16 at a time: some leave a short last chunk, of one too
        hidden = torch.randn(tokens, 8, generator=draw)
        labels = torch.randint(0, VOCABULARY, (tokens,), generator=draw)
        grads = []
        for way in (of_logits, loss_of_logits):
            weight.grad = None
            chunked_cross_entropy(hidden, weight, None, labels, 16, way).backward()
            grads.append(weight.grad)
        torch.testing.assert_close(*grads)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


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
