"""Transformer blocks that keep less for backward, or are compiled; in place, names stay."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from stages.model.options import ActivationCheckpointing, Compile
from stages.model.torch_compat import compile_checkpoints_with_casts

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
