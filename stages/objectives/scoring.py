"""A model run to the scores that an objective asks for.

All logits at once, logits in chunks, a head divided by the vocabulary and a sequence divided among
ranks are handled here, for every objective. No attention mask is passed: padding is on the right,
fast causal attention stays available, and with a mask, or a cache, transformers would overlook
where packed documents begin.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline import NO_TARGET, MicroBatch, ScoreRequest, Scores, StageError
from pipeline.utils import has_values, local_part
from stages.collectives import SEQUENCE, all_reduce, gather
from stages.objectives.chunked import chunked_cross_entropy, chunked_scores
from stages.objectives.compat import flash_documents
from stages.objectives.logits import (
    ScoreColumns,
    VocabularyShard,
    compiled_loss,
    loss_of_logits,
    sharded_cross_entropy,
    whole_vocabulary,
)

HINT = "leave out loss_chunk_size"
FUNCTION = "load_balancing_loss_func"
"""Name of the loss in each of transformers' model files that have one."""
SIZES = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
"""Attributes of a model that its own forward pass computes the loss with."""


class ReplacedHead:
    """Replacement of the LM head's forward method. Inside of `computing` it returns what a function
    makes of the hidden states as the model's logits. Hooks that a strategy has on the head (casts,
    gathered parameters) still run."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head
        self._forward = head.forward
        self._function: Callable[[Tensor, nn.Linear], Tensor] | None = None
        self._scores: Tensor | None = None
        self._version = 0

    @classmethod
    def of(cls, model: nn.Module) -> ReplacedHead:
        """The replaced head of `model`. Raises StageError for one that is not nn.Linear."""
        modules = (m for m in model.modules() if hasattr(m, "get_output_embeddings"))
        transformer: Any = next(modules, None)
        if transformer is None:
            raise StageError("loss_chunk_size: the model does not say what its head is")
        head = transformer.get_output_embeddings()
        if type(head).forward is not nn.Linear.forward:
            raise StageError(
                f"loss_chunk_size: the model's head is a {type(head).__name__}, no plain linear "
                "layer",
                hint=HINT,
            )
        if not isinstance(head.forward, cls):
            head.forward = cls(head)
        found: ReplacedHead = head.forward
        return found

    @contextlib.contextmanager
    def computing(self, function: Callable[[Tensor, nn.Linear], Tensor]) -> Iterator[None]:
        """Make forward passes return `function(hidden, head)`."""
        self._function = function
        try:
            yield
        finally:
            self._function = self._scores = None

    def require_unchanged(self, output: Tensor) -> None:
        """Raise StageError unless the model's `output` is what this head returned."""
        returned, same, kind = self._scores, False, (output.shape, output.dtype)
        if returned is not None and kind == (returned.shape, returned.dtype):
            # Wrappers return another tensor with the same memory, or a copy. Comparing values waits
            # for the device, so only copies are compared; a trace has no values, and nothing copies
            # there.
            real = has_values(output)
            if output is returned or (real and output.data_ptr() == returned.data_ptr()):
                same = returned._version == self._version
            else:
                same = real and torch.equal(output.view(torch.int32), returned.view(torch.int32))
        if not same:
            raise StageError(
                "loss_chunk_size: this model computes something with its logits (caps or scales "
                "them, say), so their loss cannot stand for them",
                hint=HINT,
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._function is None:
            return self._forward(hidden)
        self._scores = self._function(hidden, self._head)
        self._version = self._scores._version
        return self._scores


@dataclass(eq=False)
class ModelScorer:
    """Runs one model, wrapped or not."""

    model: nn.Module
    group: ProcessGroup | None = None
    """Ranks that have slices of the same sequences."""
    forward: Callable[..., Any] | None = None
    """Called in the place of the model, with its arguments."""
    _routers: dict[Any, RouterLoss] = field(default_factory=dict)

    def __call__(
        self, own: MicroBatch, whole: MicroBatch, request: ScoreRequest, **inputs: Tensor
    ) -> Scores:
        """See `pipeline.Scorer`. Raises StageError with `chunk` for a model whose head is not a
        plain linear layer, or that changes its logits (caps or scales them)."""
        count = own.tokens[request.candidates].shape[-1] if request.candidates else 0
        # A total next to other columns is summed from tokens: one pass.
        tokens = request.tokens or (request.total and (request.entropy or count > 0))
        columns = ScoreColumns(tokens, request.entropy, count)
        if request.values and (columns or request.total or request.logits):
            raise StageError("an objective asks for values, and for scores of a vocabulary")
        if request.router is not None and (self.group is not None or inputs):
            raise StageError(
                "an objective asks for the router's loss, a mean over whole sequences, which is "
                "not computed where ranks divide sequences or layers",
                hint="leave out context_parallel and pipeline_parallel",
            )
        forward = self.forward or self.model
        arguments: dict[str, Any] = {**inputs} or {"input_ids": own.input_ids, **own.free}
        if request.router is not None:
            arguments |= RouterLoss.arguments
        if own.positions is not None:
            arguments |= {"position_ids": own.positions}
            arguments |= flash_documents(self.model, own.positions)
        if request.chunk is None or request.values or request.logits:
            output = forward(**arguments, use_cache=False)
            found = self._of_logits(output.logits, own, whole, request, columns)
        else:
            head = ReplacedHead.of(self.model)
            with head.computing(
                functools.partial(_in_chunks, own=own, request=request, columns=columns)
            ):
                output = forward(**arguments, use_cache=False)
                head.require_unchanged(output.logits)
            found = columns.named(output.logits) if columns else {"total": output.logits}
        if (group := self.group) is not None:  # scores of whole sequences, from slices
            found = {
                name: all_reduce(one, group) if name == "total"
                else gather(one, group, SEQUENCE, summands=False) if name != "logits" else one
                for name, one in found.items()
            }  # fmt: skip
        if request.total and columns:
            found["total"] = found["tokens"].sum()
        if (weight := request.router) is not None:
            if weight not in self._routers:
                self._routers[weight] = RouterLoss(self.model, weight)
            found["router"] = self._routers[weight](output, own.real)
        return Scores(**found)

    def _of_logits(
        self, logits: Tensor, own: MicroBatch, whole: MicroBatch, request: ScoreRequest,
        columns: ScoreColumns,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Scores from all logits (lines, length, vocabulary), whole or divided among ranks."""
        if request.values:
            return {"values": whole_vocabulary(local_part(logits), VocabularyShard.find(logits))}
        found = dict[str, Tensor]()
        if request.logits:
            # Of the token after each row; shape (rows, vocabulary).
            length, size = whole.input_ids.shape[1], logits.shape[1]
            rank = 0 if self.group is None else dist.get_rank(self.group)
            ends = whole.row_ends()
            line, place = ends // length, ends % length - rank * size
            here = (place >= 0) & (place < size)
            at_ends = local_part(logits)[line, torch.where(here, place, 0)]
            at_ends = torch.where(here[:, None], at_ends, 0.0)
            at_ends = whole_vocabulary(at_ends, VocabularyShard.find(logits))
            found["logits"] = at_ends if self.group is None else all_reduce(at_ends, self.group)
        flat, labels = logits.flatten(0, 1), own.labels.reshape(-1)
        shard = VocabularyShard.find(flat)
        if columns:
            ids = own.tokens[request.candidates].flatten(0, 1) if request.candidates else None
            scores = columns(local_part(flat), labels, ids, shard)
            found |= columns.named(scores.view(*own.labels.shape, -1))
        elif request.total and shard is not None:
            found["total"] = -sharded_cross_entropy(flat, labels)
        elif request.total:
            wide = flat.to(torch.float32)
            found["total"] = -F.cross_entropy(wide, labels, ignore_index=NO_TARGET, reduction="sum")
        return found


def _in_chunks(
    hidden: Tensor, head: nn.Linear, own: MicroBatch, request: ScoreRequest, columns: ScoreColumns
) -> Tensor:
    """Return the sum of log-probabilities, or the token scores, shape (lines, length, columns),
    instead of the head's logits."""
    chunk, backend = request.chunk, request.compiled_by
    assert chunk is not None
    given = hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias, own.labels.reshape(-1)
    of_logits = loss_of_logits if backend is None else compiled_loss(backend)
    if columns:
        ids = own.tokens[request.candidates].flatten(0, 1) if request.candidates else None
        scores = chunked_scores(*given, ids, chunk, columns, of_logits)
        return scores.view(*own.labels.shape, -1)
    return -chunked_cross_entropy(*given, chunk, of_logits)


class RouterLoss:
    """The weighted router loss of a batch, from what the model returned for it; a scalar.

    It is a mean over the batch's tokens (Fedus et al. 2022, eq. 4 to 6), so a batch's part of a
    step's loss is its router loss times its share of the step's targets. With one batch in a step,
    that and the mean cross-entropy make the `loss` of transformers' own forward pass.
    """

    arguments: ClassVar = {"output_router_logits": True}
    """Arguments with which the model returns what the loss is computed from."""

    def __init__(self, model: nn.Module, weight: float | Literal["config"]) -> None:
        """Raises StageError for a model, wrapped or not, without such a loss."""
        for module in model.modules():
            if not all(hasattr(module, name) for name in SIZES):
                continue
            # In the file of the module's class; strategies put their own classes on top.
            files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
            losses = [getattr(file, FUNCTION) for file in files if hasattr(file, FUNCTION)]
            if losses:
                break
        else:
            message = "router_loss: the model's architecture has no loss of its router"
            raise StageError(message, hint="leave out router_loss")
        experts, picks, coefficient = (getattr(module, name) for name in SIZES)
        self._loss, self._experts, self._picks = losses[0], int(experts), int(picks)
        self.weight = float(coefficient) if weight == "config" else weight

    def __call__(self, output: Any, real: Tensor | None = None) -> Tensor:
        """The weighted loss of `output`, without padding, where `real` (lines, length) is False."""
        loss: Tensor = self._loss(output.router_logits, self._experts, self._picks, real)
        return self.weight * loss.float()
