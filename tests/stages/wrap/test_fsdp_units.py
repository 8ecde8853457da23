"""Modules that wrap.fsdp gathers as a unit."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pipeline.errors import StageError
from stages.wrap.axes import PipelineParallel
from stages.wrap.fsdp import Fsdp
from stages.wrap.fsdp_units import choose_units, kept_units


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.linear = nn.Linear(4, 4)


class Root(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.outers = nn.ModuleList([Outer(), Outer()])
        self.embedding = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4)
        if tied:
            self.head.weight = self.outers[0].inner.linear.weight


def chosen(root: nn.Module, **fields: Any) -> list[str]:
    names = {module: name for name, module in root.named_modules()}
    ends = root.embedding, root.head
    return [names[unit] for unit in choose_units(Fsdp(**fields), root, root.outers, ends)]


def kept(root: nn.Module, **fields: Any) -> list[str]:
    config, ends = Fsdp(**fields), (root.embedding, root.head)
    units = choose_units(config, root, root.outers, ends)
    names = {module: name for name, module in root.named_modules()}
    return [names[unit] for unit in kept_units(config, units, root.outers)]


def test_blocks_are_the_models_own_between_embedding_and_head() -> None:
    assert chosen(Root()) == ["embedding", "outers.0", "outers.1", "head"]


def test_an_embedding_and_a_head_of_one_weight_stay_in_the_root() -> None:
    root = Root()
    root.head.weight = root.embedding.weight
    assert chosen(root) == ["outers.0", "outers.1"]
    assert kept(root) == ["outers.1"]


def test_a_head_of_another_pipeline_stage_is_no_unit() -> None:
    root = Root()
    root.head = nn.Identity()
    assert chosen(root) == ["embedding", "outers.0", "outers.1"]


def test_what_backward_begins_with_is_kept() -> None:
    assert kept(Root()) == ["outers.1", "head"]
    assert kept(Root(), pipeline_parallel=PipelineParallel(size=2)) == [
        "embedding", "outers.1", "head",
    ]  # fmt: skip
    assert kept(Root(), units=("Outer",)) == []


def test_named_classes_come_inner_first_and_never_the_root() -> None:
    expected = ["outers.0.inner", "outers.0", "outers.1.inner", "outers.1"]
    assert chosen(Root(), units=("Outer", "Inner", "Root")) == expected


def test_tied_weights_are_not_parted() -> None:
    with pytest.raises(StageError, match="shares a weight"):
        chosen(Root(tied=True), units=("Inner",))


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(StageError, match="no modules of class Outre"):
        chosen(Root(), units=("Outre",))
