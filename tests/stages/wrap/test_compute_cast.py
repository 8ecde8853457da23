"""cast_on_use: forward and backward in the compute dtype, parameters and gradients in master."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stages.model.block_changes import checkpoint_blocks
from stages.model.hf import ActivationCheckpointing
from stages.wrap.build import cast_on_use, installed_casts


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4))


def cast_by_hand(tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    parameters = list(model().parameters())
    embedding, weight, bias, scale, shift = (p.to(torch.bfloat16) for p in parameters)
    hidden = nn.functional.embedding(tokens, embedding) @ weight.T + bias
    output = nn.functional.layer_norm(hidden, (4,), scale, shift)
    output.sum().backward()
    return output, [p.grad for p in parameters if p.grad is not None]


@pytest.mark.parametrize("recompute", [False, True])
def test_outputs_and_gradients_are_those_of_cast_parameters(recompute: bool) -> None:
    tokens = torch.tensor([1, 5, 2])
    module = model()
    cast_on_use(module, torch.bfloat16)
    output = checkpoint(module, tokens, use_reentrant=False) if recompute else module(tokens)
    output.sum().backward()
    expected, gradients = cast_by_hand(tokens)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, gradient, rtol=0.02, atol=0.02)


def test_nothing_is_left_on_the_module_even_after_an_error() -> None:
    module = nn.Linear(4, 4)
    weight = module.weight
    cast_on_use(module, torch.bfloat16)
    with pytest.raises(RuntimeError):
        module(torch.ones(3))
    assert module._parameters["weight"] is weight
    assert module.weight.dtype == torch.float32
    assert list(module.state_dict()) == ["weight", "bias"]


def test_installed_casts_can_be_told() -> None:
    module = model()
    assert installed_casts(module) == []
    cast_on_use(module, torch.float32)
    assert installed_casts(module) == []
    cast_on_use(module, torch.bfloat16)
    casts = [torch.bfloat16] * 4  # as are the root's
    assert [cast.dtype for cast in installed_casts(module)] == casts
    module = model()
    checkpoint_blocks([module[1]], ActivationCheckpointing())  # type: ignore[index]
    cast_on_use(module, torch.bfloat16)
    assert [cast.dtype for cast in installed_casts(module)] == casts


class Reads(nn.Module):
    """Uses a child's weight without calling the child, as DoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"inner": nn.Linear(3, 3, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.parts["inner"].weight.dtype) @ self.parts["inner"].weight


def test_a_child_s_parameters_are_cast_for_its_parent_too() -> None:
    module = Reads()
    cast_on_use(module, torch.bfloat16)
    out = module(torch.ones(2, 3))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    weight = module.parts["inner"].weight
    assert (weight.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(weight.grad, torch.full((3, 3), 2.0))


class Asks(nn.Module):
    """Block that asks its norm for a dtype before it calls it, as Mamba's, and has a parameter of
    its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x.to(self.norm.weight.dtype))
        out: torch.Tensor = torch.relu(self.out(hidden * self.scale))
        return out


@pytest.mark.parametrize("keep", ["nothing", "attention", "matmuls"])
def test_a_recomputed_block_finds_its_parameters_cast(
    keep: Literal["nothing", "attention", "matmuls"],
) -> None:
    """torch counts the operations of both passes where some results are kept."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        block = Asks()
        if recompute:
            checkpoint_blocks([block], ActivationCheckpointing(keep=keep))
        cast_on_use(block, torch.bfloat16)
        out = block(torch.linspace(-1, 1, 12, dtype=torch.bfloat16).view(3, 4))
        out.sum().backward()
        assert {parameter.dtype for parameter in block.parameters()} == {torch.float32}
        found.append([out, *(parameter.grad for parameter in block.parameters())])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)
