"""The run's log says so when torch gives up on a function, as its own log does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from stages.objectives import compile_compat
from stages.objectives.compile_compat import CompiledBlocks, compiled


@pytest.fixture(autouse=True)
def _few_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compile_compat, "GRAPHS", 2)
    monkeypatch.setattr(logging.getLogger("pipe"), "propagate", True)
    with torch._dynamo.config.patch(recompile_limit=2):
        yield
    torch._dynamo.reset()


def doubled(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def test_a_function_that_torch_gives_up_on_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for backend in ("eager", "eager"):  # installed twice, told once
        function = compiled(doubled, backend=backend, dynamic=False)
    for length in range(2, 8):
        assert torch.equal(function(torch.ones(length)), torch.full((length,), 2.0))
    told = [record.getMessage() for record in caplog.records if record.name == "pipe"]
    assert len(told) == 1
    assert told[0].startswith("torch has compiled doubled 2 times, and computes what is new")


def broken(values: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break(msg="a hook")
    return values * 2


@pytest.mark.parametrize(("block", "words"), [(doubled, 0), (broken, 1)])
def test_blocks_in_pieces_are_told_once(
    block: Callable[..., torch.Tensor], words: int, caplog: pytest.LogCaptureFixture
) -> None:
    shared = CompiledBlocks(finds_lengths=True)
    for _ in range(2):
        shared.forward(block, backend="eager")(torch.ones(2, 3))
    told = [record.getMessage() for record in caplog.records if record.name == "pipe"]
    assert len(told) == words
    assert all("a hook" in message for message in told)


def test_tensors_may_be_named() -> None:
    block = CompiledBlocks(finds_lengths=True).forward(doubled, backend="eager")
    for length in (2, 5, 4):
        assert block(values=torch.ones(2, length)).shape == (2, length)
    assert counters["stats"]["unique_graphs"] == 2


def test_a_higher_limit_is_not_lowered() -> None:
    with torch._dynamo.config.patch(recompile_limit=1000):
        compiled(doubled, backend="eager")
        assert torch._dynamo.config.recompile_limit == 1000
