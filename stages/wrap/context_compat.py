"""Context parallelism: several ranks share every sample, each with a slice of its tokens.

Everything but attention runs on the slice. Around attention, ranks exchange heads for parts of the
sequence (Ulysses, Jacobs et al. 2023), so each attends over the whole sequence with a share of the
heads, by the model's own attention function. Gradients are partial sums, and must be reduced over
the context group as over data ranks.

A model of transformers makes masks from the length of its input, and finds packed documents by
positions. Both see a slice of the sequence, while attention sees all of it. So an implementation of
attention is registered for each group of ranks, together with a mask function that knows the whole
sequence.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline import StageError
from stages.collectives import all_to_all
from stages.model.rotary_compat import document_angles, document_lengths
from stages.objectives.compat import flash_documents
from stages.wrap.axes import Axes, mesh_of
from stages.wrap.types_compat import refuse_type


def divide_sequence(model: nn.Module, axes: Axes, device: str) -> ProcessGroup | None:
    """Install Ulysses attention if there is a context axis; returns the group of ranks that share a
    sequence (collective). Raises StageError for a model whose attention cannot be divided."""
    if axes.context == 1:
        return None
    sizes = {"outer": axes.pipeline * axes.data, "context": axes.context, "tensor": axes.tensor}
    group = mesh_of(device, sizes)["context"].get_group()
    DividedAttention(model, group, axes.tensor)
    return group


def require_divisible(model: Any, ranks: int, tensor: int) -> None:
    """Raise StageError unless attention of a transformers model divides among context-parallel
    `ranks`, each with the heads of one of `tensor` ranks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    refuse_type("context_parallel", model.config)
    text, among = model.config.get_text_config(), ranks * tensor
    implementation, heads = str(text._attn_implementation), text.num_attention_heads
    # A weight for each head that no token takes (Xiao et al. 2023).
    sinks = any(isinstance(getattr(one, "sinks", None), Tensor) for one in model.modules())
    reason = reason_not_divisible(model)
    if not reason and implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        reason = f"has no known masks for {implementation}"
    if not reason and heads % among:
        reason = f"has {heads} attention heads, which do not divide among {among} ranks"
    if not reason and implementation == "eager" and sinks:
        reason = "has attention sinks, which its eager attention does not divide"
    if reason:
        raise StageError(f"context_parallel: {type(model).__name__} {reason}")


def reason_not_divisible(model: Any) -> str:
    """Why a model cannot be context-parallel: something other than attention functions lets tokens
    see each other. Empty if nothing does."""
    config = model.config.get_text_config()
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others:
        return f"has layers of kind {', '.join(others)}"
    if model._is_stateful:
        return "keeps a state along the sequence"
    if not model._supports_attention_backend:
        return "computes attention by itself"
    if getattr(config, "alibi", False):
        return "adds biases by distance to attention"
    return ""


class DividedAttention:
    """Attention of one model over a sequence; each rank of `group` has a slice of it. The model is
    called with its slice of the tokens, and with `position_ids` of the whole sequence, as
    `sequence_slice` makes them. `tensor` ranks share its heads too. Raises StageError for a model
    whose attention cannot be divided."""

    def __init__(self, model: Any, group: ProcessGroup, tensor: int) -> None:
        self._group = group
        self._index, self._count = dist.get_rank(group), dist.get_world_size(group)
        require_divisible(model, self._count, tensor)
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

        text = model.config.get_text_config()
        self._base = str(text._attn_implementation)
        self._mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[self._base]
        self._positions: Tensor
        """Positions of the whole sequence in the running forward, shape (samples, length)."""
        name = f"ulysses_{id(self)}_{self._base}"  # the registry keeps self, so the id is unique
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, self._whole_mask)
        # Not through `set_attn_implementation`: it guesses from names what they demand.
        for config in (model.config, text):
            config._attn_implementation_internal = name
        for angles in document_angles(model):
            angles.lengths = lambda _: self._own(document_lengths(self._positions))
        # Stages of a pipeline call this one, not the model around it.
        model.base_model.register_forward_pre_hook(self._give_slice, with_kwargs=True)

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's slice of the sequence, which is the last dimension."""
        return whole.chunk(self._count, dim=-1)[self._index]

    def _give_slice(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note the whole sequence, and pass on what the model needs of it."""
        whole: Tensor = kwargs["position_ids"]
        self._positions = whole
        # A mask of two dimensions states the length of keys, and that masks are only for padding:
        # otherwise a slice's positions would decide on packed documents.
        seen = torch.ones_like(whole, dtype=torch.bool)
        passed = {**kwargs, "position_ids": self._own(whole), "attention_mask": seen}
        return args, passed | flash_documents(model, whole)

    def _whole_mask(self, *, kv_length: int, mask_function: Callable[..., Any], **rest: Any) -> Any:
        """Called by the model for the mask of its slice; returns the whole sequence's mask."""
        from transformers import masking_utils

        changed = {"q_length": kv_length, "attention_mask": None, "mask_function": mask_function}
        # Documents of a sample by positions in them; None if every sample is one document.
        numbers = masking_utils.find_packed_sequence_indices(self._positions)
        if numbers is not None:
            within = masking_utils.packed_sequence_compatibility_function
            within = within(mask_function, self._positions, numbers)
            changed |= {"mask_function": within, "allow_is_causal_skip": False}
        return self._mask(**rest | changed, kv_length=kv_length)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attention function of transformers: states of shape (samples, heads, length, width);
        output of shape (samples, length, heads, width)."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        kwargs.pop("position_ids", None)  # of the slice; flash attention is given documents
        if "flash" in self._base and kwargs.get("cu_seq_lens_q") is None:
            raise StageError(f"context_parallel: {type(module).__name__} takes no cu_seq_lens_q")
        if kwargs.get("s_aux") is not None:  # a weight for each head
            kwargs["s_aux"] = self._own(kwargs["s_aux"])
        # Exchange slices of the sequence for a share of the heads: shapes (samples, heads, length,
        # width) become (samples, heads / ranks, length * ranks, width). Heads that do not divide,
        # as of keys and values, are repeated until they do. One all-to-all for all of them.
        shares = []
        for state in (query, key, value):
            heads = state.shape[1]
            if repeats := math.lcm(heads, self._count) // heads - 1:
                state = state.repeat_interleave(repeats + 1, dim=1)
            # (ranks, samples, heads / ranks, length, width), a view where no head is repeated.
            shares.append(torch.unflatten(state, 1, (self._count, -1)).movedim(1, 0))
        received = all_to_all(torch.cat([share.flatten(1) for share in shares], dim=1), self._group)
        parts = torch.split(received, [share[0].numel() for share in shares], dim=1)
        query, key, value = (
            part.view(share.shape).movedim(0, 2).flatten(2, 3)
            for part, share in zip(parts, shares, strict=True)
        )
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self._base, eager)
        # The module as attention functions see it, with this rank's heads.
        config = _Changed(module.config, _attn_implementation=self._base)
        groups = query.shape[1] // key.shape[1]
        local = _Changed(module, num_key_value_groups=groups, config=config)
        output, _ = attend(local, query, key, value, attention_mask, **kwargs)
        # Exchange back: shape (samples, length * ranks, heads / ranks, width) becomes (samples,
        # length, heads, width).
        slices = torch.unflatten(output, 1, (self._count, -1)).movedim(1, 0)
        return all_to_all(slices, self._group).movedim(0, 2).flatten(2, 3), None


class _Changed:
    """An object with other values of some attributes."""

    def __init__(self, of: Any, **attributes: Any) -> None:
        self._of = of
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)
