"""Changes that make a model smaller in memory or faster: their effects, and where they are
refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.errors import StageError
from stages.adapter.lora import Lora
from stages.model.block_changes import checkpoint_blocks
from stages.model.hf import ActivationCheckpointing, Compile, Fp8, HfModel
from tests.support.models import context, tiny_llama_config

SIZED = tiny_llama_config(hidden_size=32, intermediate_size=48, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=8)  # fmt: skip


def source(tmp_path: Any, config: dict[str, Any] = SIZED, **fields: Any) -> Any:
    return HfModel(config=config, **fields).run(context(tmp_path))


def test_names_and_class_stay(tmp_path: Any) -> None:
    plain = source(tmp_path).build()
    changed = source(
        tmp_path,
        activation_checkpointing=ActivationCheckpointing(),
        compile=Compile(backend="aot_eager"),
        fp8=Fp8(emulate=True),
    ).build()
    assert type(changed) is type(plain)
    assert list(changed.state_dict()) == list(plain.state_dict())


def test_the_head_and_odd_sizes_keep_their_precision(tmp_path: Any) -> None:
    model = source(tmp_path, fp8=Fp8(emulate=True)).build()
    kinds = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert kinds["lm_head"] == "Linear"
    assert {kind for name, kind in kinds.items() if name != "lm_head"} == {"Float8Linear"}
    odd = tiny_llama_config(intermediate_size=53)
    with pytest.raises(StageError, match="no linear layer's sizes are multiples of 16"):
        source(tmp_path, odd, fp8=Fp8(emulate=True)).build()


def test_what_is_exported_is_plain(tmp_path: Any) -> None:
    changed = source(
        tmp_path, activation_checkpointing=ActivationCheckpointing(), fp8=Fp8(emulate=True)
    )
    plain = changed.export_view.build()
    assert not any(type(m).__name__ == "Float8Linear" for m in plain.modules())
    assert all("forward" not in vars(module) for module in plain.modules())
    assert changed.fingerprint == changed.export_view.fingerprint


def test_a_source_says_what_compiles_it(tmp_path: Any) -> None:
    compiled = source(tmp_path, compile=Compile(backend="aot_eager"))
    adapted = Lora(rank=2, targets=("q_proj",)).run(context(tmp_path), compiled)
    assert compiled.compiled_by == adapted.compiled_by == "aot_eager"
    assert compiled.inference_view.compiled_by is source(tmp_path).compiled_by is None


class Counting(torch.nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(super().forward(x))


@pytest.mark.parametrize(
    ("every", "calls"), [(1, [2, 2, 2, 2]), (2, [2, 1, 2, 1]), (3, [2, 1, 1, 2])]
)
def test_every_nth_block_is_computed_again(every: int, calls: list[int]) -> None:
    blocks = [Counting(4, 4) for _ in range(4)]
    checkpoint_blocks(blocks, ActivationCheckpointing(every=every))
    torch.nn.Sequential(*blocks)(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert [block.calls for block in blocks] == calls


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_saved_for_backward(offload: bool) -> None:
    """A recomputed block saves its input only; with offloading, a copy of it."""
    block = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(5)))
    checkpoint_blocks([block], ActivationCheckpointing(offload=offload))
    x = torch.randn(8, 16, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = block(x)
    assert [tuple(tensor.shape) for tensor in saved if tensor.numel()] in ([], [(8, 16)])
    assert any(tensor is x or tensor.data_ptr() == x.data_ptr() for tensor in saved) != offload
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    "fields", [{"activation_checkpointing": ActivationCheckpointing()}, {"compile": Compile()}]
)
def test_a_model_without_blocks_is_refused(fields: dict[str, Any], tmp_path: Any) -> None:
    config = {"model_type": "ctrl", "n_embd": 16, "n_layer": 2, "n_head": 2, "dff": 16,
              "vocab_size": 50}  # fmt: skip
    source(tmp_path, config).build()
    with pytest.raises(StageError, match="CTRLLMHeadModel does not say which modules"):
        source(tmp_path, config, **fields).build()


@pytest.mark.parametrize(("keep", "again"), [("nothing", 2), ("matmuls", 1)])
def test_products_of_experts_are_kept(keep: Any, again: int) -> None:
    block = Experts()
    checkpoint_blocks([block], ActivationCheckpointing(keep=keep))
    with Counted() as counted:
        block(torch.randn(4, 16, requires_grad=True)).sum().backward()
    forward = 1
    assert counted.products == forward * again + 2  # and the gradients of both


class Experts(torch.nn.Module):
    """Two experts whose weights are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([2, 4], dtype=torch.int32)
        product: torch.Tensor = torch._grouped_mm(x, self.weight, offs=ends)
        return product.relu()


class Counted(TorchDispatchMode):
    """Counts grouped products."""

    products = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.products += function is torch.ops.aten._grouped_mm.default
        return function(*args, **(kwargs or {}))


def test_liger_without_triton_is_a_clear_error(tmp_path: Any) -> None:
    with pytest.raises(StageError, match="liger-kernel"):
        source(tmp_path, kernels="liger").build()
