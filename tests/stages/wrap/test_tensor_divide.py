"""Dropout in layers that two ranks divide: different masks where each has a part, equal masks where
both have the whole."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from pipeline.contracts.optimizer import Precision
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

SAMPLES, TOKENS, WIDTH, HEADS = 2, 16, 32, 4
DROPPING = {**GPT2, "attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2}
LORA = {"rank": 4, "targets": ("attn.c_proj",), "dropout": 0.2}
# The mask's shape, and whether both ranks have the same.
WHOLE, PART = ([SAMPLES, TOKENS, WIDTH], True), ([SAMPLES, TOKENS // 2, WIDTH], False)
SCORES = [SAMPLES, HEADS, TOKENS, TOKENS], True  # gathered by the plan
OWN_SCORES = [SAMPLES, HEADS // 2, TOKENS, TOKENS], False
SLICE = [SAMPLES, TOKENS, WIDTH // 2], False
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any], list[Any]]] = {
    f"{name}{', sequence' * sequence}": (config, lora, {**plan, "sequence": bool(sequence)}, masks)
    for name, config, lora, plan, of in (
        ("divided heads drop differently", sized("llama", attention_dropout=0.2), None, {},
         ([OWN_SCORES] * 2, [OWN_SCORES] * 2)),
        ("whole activations drop alike", DROPPING, None, {"plan": GPT2_PLAN},
         ([WHOLE, *[SCORES, WHOLE, WHOLE] * 2], [WHOLE, *[SCORES, PART, PART] * 2])),
        # Attention returns all heads; the next layer splits them by features.
        ("slices of an update's input drop differently", GPT2, LORA, {"plan": GPT2_PLAN},
         ([SLICE] * 2, [SLICE] * 2)),
    )
    for sequence, masks in enumerate(of)
}  # fmt: skip


def forward_masks(dist: DistContext, folder: str) -> dict[str, Any]:
    """Return the masks of each case, and whether the ranks draw alike after it."""

    def everybodys(own: Tensor) -> bool:
        lists = [torch.empty_like(own) for _ in range(dist.world_size)]
        torch.distributed.all_gather(lists, own.contiguous())
        return all(torch.equal(lists[0], other) for other in lists)

    def observed(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        out = dropout(input, p, training)
        if training and p > 0:
            masks.append(out != 0)
        return out

    dropout, found = F.dropout, {}
    precision = Precision(
        master="fp32", compute="fp32", reduce="fp32", buffer=None, loss_scaling=None
    )
    for name, (config, lora, fields, _) in CASES.items():
        ctx, masks = context(dist, folder), list[Tensor]()
        model: Any = HfModel(config=config, init="random", attention="eager").run(ctx)
        if lora is not None:
            model = Lora(**lora).run(ctx, model)
        wrap = Fsdp(tensor_parallel=TensorParallel(size=2, **fields))
        engine = wrap.run(ctx, model, precision, AdamW(lr=1e-3).run(ctx))
        torch.manual_seed(5)
        ids = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS) % 101
        with patch.object(F, "dropout", observed):
            accumulated(engine, [micro_batch(ids, ids)], 1)
        after = everybodys(torch.rand(4))
        listed = [(list(mask.shape), everybodys(mask.to(torch.uint8))) for mask in masks]
        found[name] = {"masks": listed, "equal after": after}
        engine.close()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, _ = run_ranks(forward_masks, 2, str(tmp_path_factory.mktemp("dropout")))
    return first


@pytest.mark.parametrize("name", CASES)
def test_masks_are_equal_where_both_ranks_have_the_whole(name: str, found: dict[str, Any]) -> None:
    assert found[name]["equal after"], "ranks of a group continue with different random numbers"
    assert [(shape, equal) for shape, equal in found[name]["masks"]] == CASES[name][3]
