"""Modules that wrap.fsdp gathers as a unit."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pipeline.errors import StageError
from stages.wrap.axes import PipelineParallel
from stages.wrap.fsdp import Fsdp
from stages.wrap.fsdp_engine import choose_units, kept_units


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = Inner(), nn.Linear(4, 4)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outers = nn.ModuleList([Outer(), Outer()])
        self.embedding, self.head = nn.Embedding(4, 4), nn.Linear(4, 4)


TIED = Root()
TIED.head.weight = TIED.embedding.weight
HEADLESS: Any = Root()
HEADLESS.head = nn.Identity()  # of another stage of a pipeline
IN_STAGES = {"pipeline_parallel": PipelineParallel(size=2)}
NAMED = ["outers.0.inner", "outers.0", "outers.1.inner", "outers.1"]


@pytest.mark.parametrize(
    ("root", "fields", "chosen", "kept"),
    [
        (Root(), {}, ["embedding", "outers.0", "outers.1", "head"], ["outers.1", "head"]),
        (TIED, {}, ["outers.0", "outers.1"], ["outers.1"]),
        (HEADLESS, {}, ["embedding", "outers.0", "outers.1"], ["outers.1"]),
        (
            Root(), IN_STAGES,
            ["embedding", "outers.0", "outers.1", "head"], ["embedding", "outers.1", "head"],
        ),
        (Root(), {"units": ("Outer", "Inner", "Root")}, NAMED, []),
    ],
    ids=["blocks", "tied ends", "no head", "in a pipeline", "classes"],
)  # fmt: skip
def test_units_and_those_that_backward_begins_with(
    root: Any, fields: dict[str, Any], chosen: list[str], kept: list[str]
) -> None:
    config, names = Fsdp(**fields), {module: name for name, module in root.named_modules()}
    units = choose_units(config, root, root.outers, (root.embedding, root.head))
    assert [names[unit] for unit in units] == chosen
    assert [names[unit] for unit in kept_units(config, units, root.outers)] == kept


def test_units_that_cannot_be() -> None:
    root = Root()
    with pytest.raises(StageError, match="no modules of class Outre"):
        choose_units(Fsdp(units=("Outre",)), root, root.outers, (root.embedding, root.head))
    root.head.weight = root.outers[0].inner.linear.weight
    with pytest.raises(StageError, match="shares a weight"):
        choose_units(Fsdp(units=("Inner",)), root, root.outers, (root.embedding, root.head))
