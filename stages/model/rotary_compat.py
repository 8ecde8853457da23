"""Rotary angles that depend on how long a text is, as functions of only that text.

Two kinds of rotary tables do (`config_checks.LENGTHWISE`). transformers chooses them by the
longest row of a micro-batch, and for dynamic NTK keeps in the module what the longest row so far
asked for. Here each token gets the angles that transformers computes for its document when it is
the only one, at inference say: its own function computes them, for one length after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline import MicroBatch, StageError
from pipeline.utils import has_values
from stages.model.compat import is_remote_code
from stages.model.config_checks import LENGTHWISE, other_angles

if TYPE_CHECKING:
    from torch import Tensor, nn


def choose_by_document(model: nn.Module) -> None:
    """Have the rotary tables of `model`, one of transformers, depend on each document's own length.
    Raises StageError where they would still depend on others."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, Mapping) else [kind]
        if set(kinds) & set(LENGTHWISE):
            module.forward = DocumentAngles(module, module.forward)
    config: Any = model.config
    unsuited = other_angles(config.to_dict(), of_transformers=not is_remote_code(model))
    if unsuited is not None:
        raise StageError(f"{type(model).__name__}: {unsuited[0]}", hint=unsuited[1])


def document_angles(model: nn.Module) -> list[DocumentAngles]:
    """Return the objects that `choose_by_document` has put into `model`, or the one it wraps; empty
    if no rotary table depends on the length of a text."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return [one for one in forwards if isinstance(one, DocumentAngles)]


def with_positions(batch: MicroBatch) -> MicroBatch:
    """The micro-batch with positions that show each document's length: padding, which starts again
    at 0, belongs to none. Masks take a row for one document still; causal ones need no more."""
    import torch

    if batch.positions is not None:
        return batch
    rows, length = batch.input_ids.shape
    places = torch.arange(length, device=batch.input_ids.device).expand(rows, -1)
    if batch.real is not None:
        places = torch.where(batch.real, places, places - batch.real.sum(-1, keepdim=True))
    tokens = {**batch.tokens, "positions": places}
    return replace(batch, tokens=tokens, documents=[[length]] * rows)


def placed(model: nn.Module, batch: MicroBatch) -> MicroBatch:
    """The micro-batch as `model` must get it: `with_positions` if it depends on lengths."""
    return with_positions(batch) if document_angles(model) else batch


def document_lengths(positions: Tensor) -> Tensor:
    """Return the number of tokens of each token's document, of the shape of `positions`, (...,
    length). A document is a run of ascending positions; it is as long as the last of them says."""
    import torch

    flat = positions.reshape(-1, positions.shape[-1])
    number = (torch.diff(flat, prepend=flat[:, :1] - 1, dim=-1) <= 0).cumsum(-1)
    lengths = torch.zeros_like(flat).scatter_reduce(-1, number, flat + 1, "amax")
    return lengths.gather(-1, number).view(positions.shape)


@dataclass(eq=False)
class DocumentAngles:
    """Forward method of a rotary module: transformers', for documents of one length after another.
    After each, the module is as it was."""

    module: Any
    original: Callable[..., Any]
    """The module's own forward method."""
    lengths: Callable[[Tensor], Tensor] = document_lengths
    """Returns the length of each token's document for the positions that the module is called with.
    Whoever calls it with a part of them replaces this."""

    def __call__(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None, **rest: Any
    ) -> Any:
        import torch

        if layer_type is not None:
            rest["layer_type"] = layer_type
        module, lengths = self.module, self.lengths(position_ids)
        kind, stated = module.rope_type, module.config.rope_parameters
        if layer_type is not None:
            kind, stated = kind[layer_type], stated[layer_type]
        if kind not in LENGTHWISE:
            return self.original(x, position_ids, **rest)
        long = kind == "longrope"
        # The most tokens of a text that the first table is for, and lengths that have another.
        limit = int(
            stated["original_max_position_embeddings"] if long else module.original_max_seq_len
        )
        beyond = [limit + 1]
        if not long and has_values(lengths):
            beyond = torch.unique(lengths[lengths > limit]).tolist()
        elif not long:  # without values all tokens are one document
            beyond = [lengths.shape[-1]] if lengths.shape[-1] > limit else []
        result = self._of_length(limit, x, position_ids.clamp(max=limit - 1), rest)
        for length in beyond:
            own = position_ids if long else position_ids.clamp(max=length - 1)
            chosen = lengths >= length
            for place, other in enumerate(self._of_length(length, x, own, rest)):
                # Text has the same positions on every axis.
                which = chosen if chosen.ndim < other.ndim else chosen[0]
                result[place] = torch.where(which[..., None], other, result[place])
        return tuple(result) if len(result) > 1 else result[0]

    def _of_length(
        self, length: int, x: Tensor, positions: Tensor, rest: dict[str, Any]
    ) -> list[Tensor]:
        """Cosines and sines, or angles, at `positions` of a document of `length` tokens, or of more
        if positions continue: its last position is put after them, as transformers looks for the
        largest, and its angles are dropped. Attributes and buffers of the module stay."""
        import torch

        last = torch.full_like(positions[..., :1], length - 1)
        attributes, made = dict(vars(self.module)), self.module._buffers
        buffers = dict(made)
        made |= {name: None if one is None else one.clone() for name, one in buffers.items()}
        try:
            found = self.original(x, torch.cat([positions, last], dim=-1), **rest)
        finally:
            vars(self.module).clear()
            vars(self.module).update(attributes)
            made.clear()
            made.update(buffers)
        return [one[..., :-1, :] for one in (found if isinstance(found, tuple) else (found,))]
