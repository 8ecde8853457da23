from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from pipeline.contracts.metrics import Metrics
from pipeline.contracts.stage import Context
from pipeline.distributed.process_group import DistContext
from tests.stages.data.fakes import FakeSource


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return Context(
        run_dir=tmp_path,
        seed=0,
        dist=DistContext(device=torch.device("cpu")),
        log=logging.getLogger("test"),
        metrics=Metrics(None),
    )
