"""From a source to an engine: parameters in the master dtype that compute in another, and what
engines say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.contracts.optimizer import Precision
from pipeline.distributed.process_group import DistContext
from pipeline.errors import EngineMismatch
from stages.model.block_changes import checkpoint_blocks
from stages.model.hf import ActivationCheckpointing
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.wrap.axes import PipelineParallel, TensorParallel
from stages.wrap.build import cast_on_use, installed_casts, verify_engine
from stages.wrap.ddp import Ddp
from stages.wrap.fsdp import Fsdp
from tests.parity.body import tiny_source
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import digest, hashed, train
from tests.support.tensor import FAMILIES


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4))


@pytest.mark.parametrize("recompute", [False, True])
def test_outputs_and_gradients_are_those_of_cast_parameters(recompute: bool) -> None:
    tokens, module, plain = torch.tensor([1, 5, 2]), model(), list(model().parameters())
    embedding, weight, bias, scale, shift = (one.to(torch.bfloat16) for one in plain)
    hidden = nn.functional.embedding(tokens, embedding) @ weight.T + bias
    expected = nn.functional.layer_norm(hidden, (4,), scale, shift)
    expected.sum().backward()
    cast_on_use(module, torch.bfloat16)
    output = checkpoint(module, tokens, use_reentrant=False) if recompute else module(tokens)
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    for parameter, other in zip(module.parameters(), plain, strict=True):
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0.02, atol=0.02)


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


BF16 = PrecisionPolicy(compute="bf16", reduce="bf16", buffer="bf16")
FP32 = PrecisionPolicy(compute="fp32")


def told(dist: DistContext, folder: str) -> list[Any]:
    """Return facts of engines under DDP and FSDP, those of FSDP with other units next to their
    parts, and what is said of another engine than asked for."""
    ctx, found = context(dist, folder), list[Any]()
    adamw = AdamW().run(ctx)
    for wrap in (Ddp(), Fsdp(sharding="shard_grad_op")):
        found.append(dict(wrap.run(ctx, tiny_source(ctx), BF16.run(ctx), adamw).describe()))
    for wrap in (Fsdp(), Fsdp(units=("LlamaDecoderLayer",))):
        source = tiny_source(ctx, tie_word_embeddings=False)
        engine = wrap.run(ctx, source, FP32.run(ctx), adamw)
        parts = [(one.name, one.shape, one.start) for one in engine.fragments()]
        found.append((dict(engine.describe()), parts))
    with pytest.raises(EngineMismatch) as caught:
        verify_engine(ctx, engine, {"engine": "DistributedDataParallel", "world_size": 1})
    return [*found, str(caught.value)]


def test_facts_are_read_off_what_runs(tmp_path: Path) -> None:
    ddp, fsdp, whole, named, said = run_ranks(told, 2, str(tmp_path))[0]
    for facts in (ddp, fsdp):
        dtypes = facts["master"], facts["compute"], facts["reduce"], facts["buffers"]
        assert dtypes == (["fp32"], ["bf16"], ["bf16"], ["bf16"])
    assert fsdp["reshard_after_forward"] == [False]
    assert fsdp["units"] == 4
    assert fsdp["sharded_parameters"] < fsdp["parameters"]
    # The embedding and the head are units that checkpoints do not know.
    assert (whole[0]["units"], named[0]["units"]) == (6, 4)
    assert whole[0]["reshard_after_forward"] == [False, True]
    assert named[0]["reshard_after_forward"] == [True]
    assert whole[1] == named[1]
    assert "engine: asked for 'DistributedDataParallel', found 'fully_shard'" in said
    assert "world_size: asked for 1, found 2" in said


ROUNDED = AdamW(lr=1e-3, kernel="single", stochastic_rounding=True)
NARROW = Precision(master="bf16", compute="bf16", reduce="fp32", buffer=None, loss_scaling=None)


def rounded(dist: DistContext, folder: str) -> tuple[list[str], int]:
    """Return digests of a tied embedding on the first stage of a pipeline and on the last, and the
    number of tensors of a model whose layers ranks divide. `digest` raises if ranks have other
    values of the same elements."""
    ctx = context(dist, folder)
    wrap = Fsdp(pipeline_parallel=PipelineParallel(size=2))
    engine: Any = wrap.run(ctx, tiny_source(ctx), NARROW, ROUNDED.run(ctx))
    train(engine, 0, 3)
    (stage,) = engine.parts
    copies = dist.gather(hashed(stage.get_input_embeddings().weight.detach().to_local()))
    engine.close()
    source = tiny_source(ctx, **FAMILIES["llama with biases"])
    engine = Fsdp(tensor_parallel=TensorParallel(size=2)).run(ctx, source, NARROW, ROUNDED.run(ctx))
    train(engine, 0, 3)
    found = digest(engine, dist)
    engine.close()
    return list(copies), len(found)


def test_copies_stay_alike_to_the_bit_where_each_is_rounded_at_random(tmp_path: Path) -> None:
    (first, last), tensors = run_ranks(rounded, 2, str(tmp_path))[0]
    assert first == last
    assert tensors > 50
