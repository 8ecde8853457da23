"""The proof, before the first step, that a model keeps packed documents apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from stages.objectives.scoring import ModelScorer
from stages.train.verify_packing import verify_packing
from stages.wrap.torch_engine import ModulePasses
from tests.support.models import filled, random_source, tiny_llama_config
from tests.support.packed import PACKED

SAMPLES = [PACKED.train[index] for index in range(len(PACKED.train))]


def alone(model: Any) -> Any:
    """Return a model without an engine around it, for evaluations."""
    passes = ModulePasses(model, ModelScorer(model), DistContext(device=torch.device("cpu")))
    return SimpleNamespace(
        evaluate=passes.evaluate, total=lambda one: one, device=passes.device,
        data_axis=passes.here.data, describe=lambda: {"compute": ["fp32"]},
    )  # fmt: skip


@pytest.fixture
def model(tmp_path: Any) -> Any:
    return filled(random_source(tiny_llama_config(vocab_size=64), tmp_path)).train()


def test_what_holds_is_proven(model: Any) -> None:
    verify_packing(alone(model), PACKED, SAMPLES)
    assert model.training


def test_documents_that_see_each_other_are_found(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda **given: whole(**given, attention_mask=torch.ones_like(given["input_ids"])),
    )
    with pytest.raises(StageError, match="packing: a document sees the one before it"):
        verify_packing(alone(model), PACKED, SAMPLES)


def test_positions_that_do_not_begin_anew_are_found(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():  # attention other than the mean over all tokens
        for name, parameter in model.named_parameters():
            parameter *= 20 if "q_proj" in name or "k_proj" in name else 1
    whole = model.model.rotary_emb.forward

    def elsewhere(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        packed = bool((position_ids == 0).sum() > 1)
        stretched = position_ids * (1 + torch.arange(x.shape[1]) % 2)
        return whole(x, stretched if packed else position_ids)

    monkeypatch.setattr(model.model.rotary_emb, "forward", elsewhere)
    with pytest.raises(StageError, match="packed sample differs from its loss"):
        verify_packing(alone(model), PACKED, SAMPLES)
