"""Dropout in layers that two ranks divide: other masks on what each has a part of, equal masks on
what both have whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from pipeline.contracts.precision import Precision
from pipeline.distributed.process_group import DistContext
from stages.adapter.lora import Lora
from stages.model.hf import HfModel
from stages.optimizer.adamw import AdamW
from stages.wrap.axes import TensorParallel
from stages.wrap.fsdp import Fsdp
from tests.support.batches import accumulated, micro_batch
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.tensor import GPT2, GPT2_PLAN, sized

GPT2_DROPPING = {**GPT2, "attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2}
LLAMA_DROPPING = sized("llama", attention_dropout=0.2)
SAMPLES, TOKENS, WIDTH, HEADS = 2, 16, 32, 4


class Dropped(NamedTuple):
    """One call of dropout: the mask's shape, and whether both ranks have the same."""

    shape: tuple[int, ...]
    equal: bool


@contextmanager
def recorded(masks: list[Tensor]) -> Iterator[None]:
    """Keep the mask of each call of dropout."""
    dropout = F.dropout

    def observed(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        out = dropout(input, p, training)
        if training and p > 0:
            masks.append(out != 0)
        return out

    with patch.object(F, "dropout", observed):
        yield


def forward_masks(
    dist: DistContext, folder: str, config: dict[str, Any], fields: dict[str, Any],
    lora: dict[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    def everybodys(own: Tensor) -> bool:
        """Return whether all ranks have the same values."""
        lists = [torch.empty_like(own) for _ in range(dist.world_size)]
        torch.distributed.all_gather(lists, own.contiguous())
        return all(torch.equal(lists[0], other) for other in lists)

    ctx = context(dist, folder)
    model: Any = HfModel(config=config, init="random", attention="eager").run(ctx)
    if lora is not None:
        model = Lora(**lora).run(ctx, model)
    wrap = Fsdp(tensor_parallel=TensorParallel(size=2, **fields))
    precision = Precision(
        master="fp32", compute="fp32", reduce="fp32", buffer=None, loss_scaling=None
    )
    engine = wrap.run(ctx, model, precision, AdamW(lr=1e-3).run(ctx))
    masks: list[Tensor] = []
    torch.manual_seed(5)
    ids = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS) % 101
    with recorded(masks):
        accumulated(engine, [micro_batch(ids, ids)], 1)
    after = everybodys(torch.rand(4))
    found = [(list(mask.shape), everybodys(mask.to(torch.uint8))) for mask in masks]
    engine.close()
    return {"masks": found, "equal after": after}


def dropped(
    folder: Any, config: dict[str, Any], lora: dict[str, Any] | None = None, **fields: Any
) -> list[Dropped]:
    first, _ = run_ranks(forward_masks, 2, str(folder), config, fields, lora)
    assert first["equal after"], "ranks of a group go on with different random numbers"
    return [Dropped(tuple(shape), equal) for shape, equal in first["masks"]]


WHOLE = Dropped((SAMPLES, TOKENS, WIDTH), equal=True)
PART = Dropped((SAMPLES, TOKENS // 2, WIDTH), equal=False)
SCORES = Dropped((SAMPLES, HEADS, TOKENS, TOKENS), equal=True)  # gathered by the plan


@pytest.mark.parametrize("sequence", [False, True])
def test_divided_heads_drop_differently(sequence: bool, tmp_path: Any) -> None:
    found = dropped(tmp_path, LLAMA_DROPPING, sequence=sequence)
    assert found == [Dropped((SAMPLES, HEADS // 2, TOKENS, TOKENS), equal=False)] * 2


@pytest.mark.parametrize(("sequence", "states"), [(False, WHOLE), (True, PART)])
def test_whole_activations_drop_alike(sequence: bool, states: Dropped, tmp_path: Any) -> None:
    found = dropped(tmp_path, GPT2_DROPPING, sequence=sequence, plan=GPT2_PLAN)
    assert found == [WHOLE, *[SCORES, states, states] * 2]


@pytest.mark.parametrize("sequence", [False, True])
def test_slices_of_an_updates_input_drop_differently(sequence: bool, tmp_path: Any) -> None:
    """Attention returns all heads; the next layer splits them by features."""
    lora = {"rank": 4, "targets": ("attn.c_proj",), "dropout": 0.2}
    found = dropped(tmp_path, GPT2, lora, sequence=sequence, plan=GPT2_PLAN)
    assert found == [Dropped((SAMPLES, TOKENS, WIDTH // 2), equal=False)] * 2
