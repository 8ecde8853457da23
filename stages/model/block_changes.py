"""Changes of a built model, in place. Only for training: checkpointing, compiling, 8-bit products,
Liger kernels. Parts that text does not use are left out.

Names of parameters stay. Hooks around a block's forward, which its recomputation repeats, use
private names of torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pipeline import StageError
from pipeline.utils import optional
from stages.model.settings import ActivationCheckpointing, Fp8, HfSettings
from stages.objectives.compat import CompiledBlocks

CHANGES = ("activation_checkpointing", "compile", "fp8", "kernels")
"""Fields of the slot that ask for such changes."""
MULTIPLE = 16
"""8-bit products are defined for multiples of this size (torch._scaled_mm)."""
SHARED = -1
"""Key of `around_forward`'s hooks on every module; torch counts its own from 0."""
INSIDE = "_hooks_inside_of_forward"
"""Attribute of modules whose forward calls these hooks itself: a list, empty or of one pair."""

Forward = Callable[..., Any]


def change_blocks(stage: HfSettings, model: Any, blocks: Sequence[nn.Module]) -> None:
    """Apply the slot's changes to a model and its blocks. Raises StageError for changes of blocks
    in a model whose blocks are not known."""
    if not blocks and (stage.activation_checkpointing is not None or stage.compile is not None):
        raise StageError(
            f"{type(model).__name__} does not say which modules are its blocks, so none can be "
            "recomputed or compiled",
            hint="leave out activation_checkpointing and compile",
        )
    if stage.kernels is not None:
        needed = "kernels: liger needs liger-kernel, and that needs Triton"
        with optional(needed, hint="pip install liger-kernel"):
            from liger_kernel.transformers import _apply_liger_kernel_to_instance
            from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
        kind = model.config.model_type
        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise StageError(f"Liger has no kernels for {kind}", hint="leave out kernels")
        # Its own losses would replace the loss that is normalised over the whole step.
        _apply_liger_kernel_to_instance(
            model=model, cross_entropy=False, fused_linear_cross_entropy=False
        )
    if stage.fp8 is not None:
        _use_fp8(model, stage.fp8)
    if stage.activation_checkpointing is not None:
        checkpoint_blocks(blocks, stage.activation_checkpointing)
    if stage.compile is not None:
        # Blocks of a kind share their graphs: one of the first shape of samples, one of all others.
        settings = stage.compile
        shared = CompiledBlocks(finds_lengths=settings.dynamic is None)
        mode = None if settings.mode == "default" else settings.mode
        for block in blocks:
            block.forward = shared.forward(
                block.forward, backend=settings.backend, mode=mode, dynamic=settings.dynamic
            )


def linear_layers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of all linear layers but the head: torch's class and its subclasses,
    and GPT-2's. Routers, and experts that are one tensor, are excluded."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if is_linear(module) and module is not head:
            yield name, module


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear layer of torch, or GPT-2's."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def checkpoint_blocks(blocks: Sequence[nn.Module], settings: ActivationCheckpointing) -> None:
    """Have every n-th block recompute itself in backward.

    The forward method is replaced, not the module: a strategy's hooks on the block stay outside,
    except `around_forward`'s, and its hooks on modules within are repeated with them.
    """
    for block in blocks[:: settings.every]:
        block.forward = _recomputed(with_hooks(block, block.forward), settings)


def _recomputed(forward: Forward, settings: ActivationCheckpointing) -> Forward:
    aten, kept = torch.ops.aten, set[Any]()
    contexts: dict[str, Any] = {}

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    if settings.keep != "nothing":
        kept = {
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_attention_math.default,
            torch.ops.higher_order.flex_attention,
        }
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    if settings.keep == "matmuls":
        products = "mm addmm bmm baddbmm _grouped_mm _scaled_mm"
        kept |= {getattr(aten, name).default for name in products.split()}

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        inputs: AbstractContextManager[Any] = contextlib.nullcontext()
        if settings.offload:  # sees only what is saved outside of the recomputed part: its inputs
            inputs = torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
        with inputs:
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


def around_forward(module: nn.Module, before: Forward, after: Forward) -> None:
    """Call `before` ahead of `module`'s forward, and `after` after it, even if forward raises. A
    forward that `with_hooks` has made calls them itself.

    torch's own registration numbers hooks, and compiled graphs look up the numbers: each block
    would get its own graph, up to a limit beyond which blocks are not compiled.
    """
    if hasattr(module, INSIDE):
        getattr(module, INSIDE)[:] = [(before, after)]
        return
    module._forward_pre_hooks[SHARED] = before
    module._forward_hooks[SHARED] = after
    module._forward_hooks_always_called[SHARED] = True


def hooks_before(module: nn.Module) -> Iterator[Forward]:
    """Yield the hooks ahead of `module`'s forward, also those that forward calls itself."""
    yield from module._forward_pre_hooks.values()
    yield from (before for before, _ in getattr(module, INSIDE, ()))


def with_hooks(module: nn.Module, forward: Forward) -> Forward:
    """Return a forward of `module` that calls the hooks that `around_forward` will put on it, so
    that a recomputation repeats them; torch calls hooks outside of it."""
    hooks: list[tuple[Forward, Forward]] = []
    setattr(module, INSIDE, hooks)

    @functools.wraps(forward)
    def between(*args: Any, **kwargs: Any) -> Any:
        if not hooks:
            return forward(*args, **kwargs)
        ((before, after),) = hooks
        before(module, args)
        try:
            return forward(*args, **kwargs)
        finally:
            after(module, args, None)

    return between


def _use_fp8(model: Any, settings: Fp8) -> None:
    """Have linear layers of suited sizes but the head multiply in 8 bits. Raises StageError."""
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
        message = f"fp8: no linear layer's sizes are multiples of {MULTIPLE}"
        raise StageError(message, hint="leave out fp8")
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: module in suited
    )


# Models of more than text: only the language model, the embedding and the head are built into
# memory, within the architecture's own class, whose names, config and files stay. What is left out
# has no memory, no gradients and no optimizer state; an export takes it from the source's files.

WITHOUT_TEXT = ("MllamaCrossAttentionDecoderLayer",)
"""Classes of modules in a language model that are skipped where there are no images."""


class LeftOut(nn.Module):
    """In the place of a part that text does not use."""

    place: str

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StageError(f"text passes through {self.place}, which is not part of a language model")


def leave_out_towers(model: Any) -> None:
    """Take from a model of more than text every parameter that text does not use. Raises StageError
    for one that does not say which part of it is its language model."""
    decoder = model.get_decoder()
    apart = decoder is not None and decoder is not model and decoder is not model.base_model
    if not apart or getattr(model.config, "is_encoder_decoder", False):
        raise StageError(
            f"{type(model).__name__} is a model of more than text, and transformers does not say "
            "which part of it is a language model",
            hint="train a language model",
        )
    parts = (decoder, model.get_input_embeddings(), model.get_output_embeddings())
    kept = {id(one) for part in parts if part is not None for one in part.parameters()}
    skipped = (one for one in model.modules() if type(one).__name__ in WITHOUT_TEXT)
    kept -= {id(one) for layer in skipped for one in layer.parameters()}
    modules = [("", model)]
    for prefix, module in modules:  # which grows
        for leaf, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept:
                module._parameters[leaf] = None
        for leaf, child in list(module.named_children()):
            inner = [id(parameter) for parameter in child.parameters()]
            if inner and kept.isdisjoint(inner):
                left_out = LeftOut()
                left_out.place = prefix + leaf
                module.add_module(leaf, left_out)
            elif not kept.issuperset(inner):
                modules.append((f"{prefix}{leaf}.", child))
