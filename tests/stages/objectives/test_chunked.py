"""Scores of a head in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from stages.objectives.chunked import chunked_cross_entropy
from tests.support.tier import examples


@examples(60)
@given(
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 50),
    vocabulary=st.integers(1, 30),
    bias=st.booleans(),
    frozen=st.sampled_from(["", "hidden", "weight"]),
    seed=st.integers(0, 1000),
)
def test_chunks_give_the_loss_and_gradients_of_the_whole(
    tokens: int, chunk: int, vocabulary: int, bias: bool, frozen: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = {
        "hidden": torch.randn(tokens, 6, generator=generator),
        "weight": torch.randn(vocabulary, 6, generator=generator),
        "bias": torch.randn(vocabulary, generator=generator),
    }
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100

    def run(loss: Any) -> tuple[float, list[torch.Tensor | None]]:
        given = {n: v.clone().requires_grad_(n != frozen) for n, v in values.items()}
        made = loss(given["hidden"], given["weight"], given["bias"] if bias else None) * 0.7
        made.backward()
        return float(made.detach()), [v.grad for v in given.values()]

    ours, found = run(lambda h, w, b: chunked_cross_entropy(h, w, b, labels, chunk))
    whole, expected = run(
        lambda h, w, b: F.cross_entropy(F.linear(h, w, b), labels, reduction="sum")
    )
    assert ours == pytest.approx(whole, rel=1e-5, abs=1e-5)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_without_gradients_no_product_is_made_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("stages.objectives.chunked._add_product", lambda *_: made.append(1))
    hidden, weight = torch.randn(24, 8), torch.nn.Parameter(torch.randn(50, 8))
    labels = torch.randint(0, 50, (24,))
    with torch.no_grad():
        found = chunked_cross_entropy(hidden, weight, None, labels, 4)
    assert not made
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(found, expected)
    chunked_cross_entropy(hidden, weight, None, labels, 4)
    assert len(made) == 6


def test_in_bf16_the_loss_is_that_of_fp32_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=generator).bfloat16()
    weight = torch.randn(2000, 16, generator=generator).bfloat16()
    labels = torch.randint(0, 2000, (300,), generator=generator)
    whole = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    found = chunked_cross_entropy(hidden, weight, None, labels, 64)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(whole), rel=1e-6)


def test_in_bf16_gradients_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.objectives.chunked.PIECE", 16 * 7)  # seven rows at a time
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(200, 16, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 200, (300,), generator=generator)

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        loss.backward()
        found = [hidden.grad.clone(), weight.grad.clone()]
        hidden.grad = weight.grad = None
        return found

    whole = gradients(F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum"))
    chunked = gradients(chunked_cross_entropy(hidden, weight, None, labels, 8))
    for one, other in zip(chunked, whole, strict=True):
        # as many chunks, summed in bf16, would be off by several per cent
        torch.testing.assert_close(one, other, rtol=1e-2, atol=0.02)
