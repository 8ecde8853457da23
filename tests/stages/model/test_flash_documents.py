"""Where flash attention is told that documents begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stages.model.documents_compat import flash_documents


def model(attention: str) -> nn.Module:
    module: Any = nn.Linear(1, 1)
    module.config = SimpleNamespace(_attn_implementation=attention)
    return nn.Sequential(module)


def test_documents_begin_where_positions_do() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    told = flash_documents(model("flash_attention_2"), positions)
    assert told["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 10]
    assert told["cu_seq_lens_q"].dtype == torch.int32
    assert told["cu_seq_lens_k"].tolist() == told["cu_seq_lens_q"].tolist()
    assert (told["max_length_q"], told["max_length_k"]) == (4, 4)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_other_attention_is_told_nothing(attention: str) -> None:
    assert flash_documents(model(attention), torch.zeros(1, 3)) == {}
