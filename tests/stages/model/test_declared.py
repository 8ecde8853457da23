from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from pipeline.contracts.model import ModelSource
from pipeline.distributed.process_group import DistContext
from stages.model.declared import outline
from stages.model.hf import HfModel
from stages.model.source import open_source
from tests.support.models import tiny_llama_config
from tests.support.runs import context

MOST = 2**31 - 1


def test_a_parameter_that_is_larger_than_the_machine(tmp_path: Path) -> None:
    """Moved to the meta device once it is made, 288 GiB would have to be there first."""
    config = {"model_type": "llama", **tiny_llama_config(), "vocab_size": MOST}
    source = open_source(
        HfModel(config=config), context(DistContext(device=torch.device("cpu")), str(tmp_path))
    )
    model = outline(source)
    assert model.get_parameter("lm_head.weight").shape[0] == MOST
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


class Filled(nn.Module):
    """Fills a tensor that it makes without values, as a buffer and as an attribute."""

    def __init__(self, attribute: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        table = torch.empty(2)
        table.fill_(7.0)
        if attribute:
            self.table = table
        else:
            self.register_buffer("table", table)


class Source(ModelSource):
    def __init__(self, attribute: bool) -> None:
        self.attribute = attribute

    def build(self) -> nn.Module:
        return Filled(self.attribute)

    def tie(self, model: nn.Module) -> None:
        pass

    name = fingerprint = vocab_size = weights = blocks = tokenizer = scorer = save_assets = None  # type: ignore[assignment]


def test_tensors_that_are_filled_after_they_are_made_have_values() -> None:
    for attribute in (False, True):
        model = outline(Source(attribute))
        assert model.weight.is_meta
        assert model.table.tolist() == [7.0, 7.0]  # type: ignore[operator]
