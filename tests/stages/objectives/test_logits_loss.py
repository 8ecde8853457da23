"""The loss of a chunk's logits, as it is and compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from stages.objectives.chunked import chunked_cross_entropy
from stages.objectives.logits_loss import compiled_loss, loss_of_logits

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
