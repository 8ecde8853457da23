"""The arithmetic of a step: by hand, and what torch counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline.forecast.shapes import ModelShape, SampleShape
from pipeline.forecast.site import Site
from stages.train.work import pairs, work
from torch.utils.flop_counter import FlopCounterMode

from stages.adapter.lora import Lora
from stages.model.hf import HfModel
from stages.model.options import ActivationCheckpointing
from tests.support.forecasts import LLAMA, declared
from tests.support.models import context

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
SITE = Site(ranks=1, local_ranks=1, device="cpu")
MATRICES = 2 * 512 * 512 + 2 * 128 * 512 + 3 * 1408 * 512
UPDATES = 8 * (2 * (512 + 512) + 2 * (128 + 512) + 3 * (1408 + 512))
HEAD = 8000 * 512
LENGTH = 1000
SEEN = LENGTH * (LENGTH + 1) // 2
"""Pairs of a token and one that it sees."""
ATTENTION = 4 * 512 * SEEN
"""Forward, of a sample in a block."""


def of(shape: ModelShape, samples: int = 1, *, packed: bool = False) -> tuple[float, float]:
    done = work(shape, SampleShape(length=LENGTH, packed=packed), samples)
    return done.useful, done.again


def recomputed(**fields: Any) -> ModelShape:
    asked = ActivationCheckpointing(**fields)
    return HfModel(config=LLAMA, activation_checkpointing=asked).forecast(SITE)


def test_a_step_by_hand() -> None:
    """6 operations for each element of a matrix, the embedding's none; attention is causal."""
    products = LENGTH * 6 * (4 * MATRICES + HEAD)
    assert of(declared(LLAMA), 3) == (3 * (products + 4 * 3 * ATTENTION), 0)
    tied = declared({**LLAMA, "tie_word_embeddings": True})
    assert of(tied) == of(declared(LLAMA))
    assert of(declared(LLAMA))[0] == pytest.approx(92.2e9 + 12.3e9, rel=1e-3)


def test_frozen_weights_by_hand() -> None:
    """A frozen matrix takes 4 operations an element, in the first block 2: nobody needs a gradient
    of embeddings that are frozen. These themselves take none."""
    frozen = LENGTH * ((2 + 3 * 4) * MATRICES + 4 * HEAD)
    updates = LENGTH * (4 + 3 * 6) * UPDATES
    shape = Lora(rank=8).forecast(SITE, declared(LLAMA))
    assert of(shape) == (frozen + updates + (1 + 3 * 3) * ATTENTION, 0)


@pytest.mark.parametrize(
    ("fields", "again"),
    [
        ({}, 4 * (LENGTH * 2 * (MATRICES - 1408 * 512) + ATTENTION)),
        ({"every": 2}, 2 * (LENGTH * 2 * (MATRICES - 1408 * 512) + ATTENTION)),
        ({"keep": "attention"}, 4 * LENGTH * 2 * (MATRICES - 1408 * 512)),
        ({"keep": "matmuls"}, 0),
    ],
)
def test_what_is_kept_is_not_computed_again(fields: dict[str, Any], again: int) -> None:
    assert of(recomputed(**fields)) == (of(declared(LLAMA))[0], again)


def test_windows_and_documents() -> None:
    windowed = declared({**LLAMA, "model_type": "mistral", "sliding_window": 3}).blocks[0]
    # of 5 tokens: 1, 2, 3, 3, 3
    assert pairs(SampleShape(length=5), windowed) == 12
    assert pairs(SampleShape(length=2), windowed) == 3
    assert pairs(SampleShape(length=5), declared(LLAMA).blocks[0]) == 15
    assert pairs(SampleShape(length=5, packed=True), windowed) == 5
    kinds = ["sliding_attention", "full_attention"] * 2
    alternating = {"model_type": "gemma3_text", "sliding_window": 3, "layer_types": kinds}
    blocks = declared({**LLAMA, **alternating}).blocks
    assert [pairs(SampleShape(length=5), block) for block in blocks] == [12, 15, 12, 15]


@pytest.mark.parametrize("lora", [None, Lora(rank=2), Lora(rank=2, targets=("q_proj",))])
@pytest.mark.parametrize(
    "fields", [None, {}, {"keep": "attention"}, {"keep": "matmuls"}, {"every": 2}]
)
def test_products_are_those_that_torch_makes(
    lora: Lora | None, fields: dict[str, Any] | None, tmp_path: Path
) -> None:
    """All of them; of low-rank updates all but a few gradients in the first block."""
    config = {**LLAMA, "num_hidden_layers": 3, "vocab_size": 100}
    asked = None if fields is None else ActivationCheckpointing(**fields)
    stage = HfModel(config=config, init="random", activation_checkpointing=asked)
    ctx, length = context(tmp_path), 7
    source = stage.run(ctx)
    adapted = source if lora is None else lora.run(ctx, source)
    model, ids = adapted.build(), torch.arange(2 * length).view(2, length)
    adapted.tie(model)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.float().logsumexp(-1).sum().backward()
    shape = stage.forecast(SITE)
    shape = shape if lora is None else lora.forecast(SITE, shape)
    data = SampleShape(length=length)
    done = work(shape, data, 2)
    counts = counter.get_flop_counts()["Global"]
    made = sum(count for kind, count in counts.items() if kind in PRODUCTS)
    seen = 2 * 4 * 512 * pairs(data, shape.blocks[0])
    attention = seen * (9 if lora is None else 7)
    if fields is not None and fields.get("keep", "nothing") == "nothing":
        attention += seen * (2 if "every" in fields else 3)
    told = done.total - attention
    if lora is None:
        assert told == made
    else:
        assert 0.8 * made < told <= made
