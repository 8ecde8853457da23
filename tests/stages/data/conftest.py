from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from pipeline.dist import Dist
from pipeline.metrics import Metrics
from pipeline.stage import Context
from tests.stages.data.fakes import FakeSource


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return Context(
        run_dir=tmp_path,
        seed=0,
        dist=Dist(device=torch.device("cpu")),
        log=logging.getLogger("test"),
        metrics=Metrics(None),
    )
