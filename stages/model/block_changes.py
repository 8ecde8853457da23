"""Transformer blocks that keep less for backward, or are compiled; in place, names stay."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pipeline.errors import StageError
from pipeline.utils.optional import optional
from stages.model.hf import ActivationCheckpointing, Compile, Fp8


def linear_layers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of all but the head: torch's and its subclasses, and GPT-2's kind. What
    only looks like one, such as a router or experts that are one tensor, is none."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if is_linear(module) and module is not head:
            yield name, module


def is_linear(module: nn.Module) -> bool:
    """Whether it is such a layer."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


Forward = Callable[..., Any]


def checkpoint_blocks(blocks: Sequence[nn.Module], settings: ActivationCheckpointing) -> None:
    """Have every n-th block recompute itself in backward.

    The forward method is replaced, not the module: what a strategy hooks onto the block stays
    outside, and what it hooks onto modules within is repeated with them.
    """
    for block in blocks[:: settings.every]:
        block.forward = _recomputed(block.forward, settings)


def compile_blocks(blocks: Sequence[nn.Module], settings: Compile) -> None:
    """Compile the blocks' forward methods; blocks of a kind share what is compiled."""
    compile_checkpoints_with_casts()
    for block in blocks:
        block.forward = torch.compile(
            block.forward,
            backend=settings.backend,
            mode=None if settings.mode == "default" else settings.mode,
            dynamic=settings.dynamic,
        )


def _recomputed(forward: Forward, settings: ActivationCheckpointing) -> Forward:
    contexts: dict[str, Any] = {}
    if settings.keep != "nothing":
        contexts["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _policy(settings.keep)
        )

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        with _offloading() if settings.offload else contextlib.nullcontext():
            return checkpoint(
                forward,
                *args,
                use_reentrant=False,
                # A strategy may hold a parameter in pieces when the two passes are compared.
                determinism_check="none",
                **contexts,
                **kwargs,
            )

    return recomputed


def _offloading() -> AbstractContextManager[Any]:
    # Only what is saved outside of the recomputed part passes through here: its inputs.
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def _policy(keep: str) -> Callable[..., CheckpointPolicy]:
    kept = _attention() | (_products() if keep == "matmuls" else set())

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _attention() -> set[Any]:
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_attention_math.default,
        torch.ops.higher_order.flex_attention,
    }


def _products() -> set[Any]:
    aten = torch.ops.aten
    return {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._grouped_mm.default,
        aten._scaled_mm.default,
    }


MULTIPLE = 16
"""Sizes that 8-bit products are defined for (torch._scaled_mm)."""


def use_fp8(model: Any, settings: Fp8) -> None:
    """Have linear layers multiply in 8 bits, but for the head and those of odd sizes. Raises
    StageError when there is none."""
    with optional("fp8 needs torchao", hint="pip install 'pipetrain[torchao]'"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name(settings.recipe)
    object.__setattr__(config, "emulate", settings.emulate)
    suited = [
        module
        for _, module in linear_layers(model)
        if type(module) is nn.Linear
        and not module.in_features % MULTIPLE
        and not module.out_features % MULTIPLE
    ]
    if not suited:
        raise StageError(
            f"fp8: no linear layer's sizes are multiples of {MULTIPLE}", hint="leave out fp8"
        )
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: module in suited
    )


def use_liger(model: Any) -> None:
    """Replace parts of the model by Liger's kernels. Raises StageError for an architecture that it
    does not know."""
    needed = "kernels: liger needs liger-kernel, and that needs Triton"
    with optional(needed, hint="pip install liger-kernel"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise StageError(f"Liger has no kernels for {kind}", hint="leave out kernels")
    # Its losses would take the place of the one that is normalised over the whole step.
    _apply_liger_kernel_to_instance(
        model=model, cross_entropy=False, fused_linear_cross_entropy=False
    )


def compile_checkpoints_with_casts() -> None:
    """Have torch compile recomputed blocks whose modules a strategy changes and changes back while
    they run (`stages/wrap/compute_cast.py`); by default it compiles no recomputed part that
    assigns to anything."""
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
