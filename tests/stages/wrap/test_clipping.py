"""Gradients are clipped by a norm that is accumulated in fp32, whatever their dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stages.wrap.torch_engine import clip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_has_the_digits_of_fp32(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(301, 7, generator=draw).to(dtype) for _ in range(3)]
    parameters = [nn.Parameter(torch.zeros(301, 7, dtype=dtype)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    exact = float(torch.cat(gradients).double().norm())
    assert float(clip(parameters, 2.0)) == pytest.approx(exact, rel=1e-5)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        wanted = gradient.float() * (2.0 / exact)
        torch.testing.assert_close(parameter.grad, wanted.to(dtype), rtol=1e-2, atol=1e-6)
