"""Parameters that patterns freeze: the numbers of a plain loop with the same parameters frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.distributed.process_group import DistContext
from tests.parity.body import BATCH, SEED, STEPS, tiny_source, train_case
from tests.parity.numbers import assert_same_numbers
from tests.parity.reference import reference
from tests.support.processes import RankFailed, run_ranks
from tests.support.runs import context, toy_data

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

FROZEN = ("model.embed_tokens.*", "model.layers.0.*", "model.layers.2.mlp.*")
PIPELINE = {"pipeline_parallel": {"size": 2}, "sharding": "shard_grad_op"}
TENSOR = {"tensor_parallel": {"size": 2}}


@pytest.mark.parametrize(
    ("ranks", "wrap", "fields"),
    [
        pytest.param(2, "wrap.ddp", {}, id="ddp"),
        pytest.param(2, "wrap.fsdp", {}, id="fsdp"),
        pytest.param(2, "wrap.fsdp", TENSOR, id="tensor"),
        pytest.param(2, "wrap.zero", {"stage": 3}, id="zero3"),
        pytest.param(2, "wrap.fsdp", PIPELINE, id="pipeline"),
        pytest.param(2, "wrap.zero", {"stage": 2}, id="zero2", marks=pytest.mark.full),
        pytest.param(4, "wrap.fsdp", TENSOR, id="fsdp x tensor", marks=pytest.mark.full),
    ],
)
def test_the_numbers_of_a_plain_loop(
    ranks: int, wrap: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model, hf = {"tie_word_embeddings": False}, {"frozen": FROZEN}
    case = {
        "wrap": wrap, "fields": fields, "batching": {"micro_batch_size": 2}, "hf": hf,
        "model": model,
    }  # fmt: skip
    result = run_ranks(train_case, ranks, str(tmp_path), case, limit=300)[0]
    ctx = context(DistContext(device=torch.device("cpu")), str(tmp_path), SEED)
    source = tiny_source(ctx, fields=hf, **model)
    expected = reference(source, toy_data(), seed=SEED, steps=STEPS, batch=BATCH)
    trained = set(expected[2]) - set(source.frozen_base)
    final = tmp_path / "final.safetensors"
    assert_same_numbers(result, expected, final, trained)
    assert load_file(final).keys() == trained
    assert "model.layers.2.self_attn.q_proj.weight" in trained
    assert len(source.frozen_base) == 1 + 9 + 3
    if fields != PIPELINE:  # each of its ranks counts its own
        count = sum(expected[2][name].numel() for name in trained)
        assert result["facts"]["trained_parameters"] == count


def test_a_first_stage_without_trained_weights_is_refused(tmp_path: Path) -> None:
    case = {
        "wrap": "wrap.fsdp", "fields": PIPELINE, "batching": {"micro_batch_size": 2},
        "hf": {"frozen": ("model.embed_tokens.*", "model.layers.[01].*")},
        "model": {"tie_word_embeddings": False},
    }  # fmt: skip
    with pytest.raises(RankFailed, match="none of the trained weights are in this rank's blocks"):
        run_ranks(train_case, 2, str(tmp_path), case)
