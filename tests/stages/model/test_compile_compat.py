"""What torch says to its log when it gives up on a function reaches the run's log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from stages.model import compile_compat
from stages.model.compile_compat import compiled


@pytest.fixture(autouse=True)
def _few_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
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


def test_a_higher_limit_is_not_lowered() -> None:
    with torch._dynamo.config.patch(recompile_limit=1000):
        compiled(doubled, backend="eager")
        assert torch._dynamo.config.recompile_limit == 1000
